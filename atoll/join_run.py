"""`atoll join` around the node: real transport, a closing line, figures as JSON."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from node.join import join
from node.site import Site
from protocol.errors import ConfigError
from protocol.grpc_transport import GrpcTransport
from protocol.spec import NAME
from protocol.state_dir import write_atomically
from protocol.transport import host_of

EVERYWHERE = ("0.0.0.0", "[::]", "::")


async def join_run(site: Site, out: Path | None) -> None:
    """Raises ConfigError if the trainer cannot be started, or others could not be told where this one is."""
    if site.command and shutil.which(site.command[0]) is None:
        raise ConfigError(
            f"{site.command[0]}: no such program: after -- comes the training command, "
            "as in `atoll join ADDRESS -- python train.py`"
        )
    if not re.fullmatch(NAME, site.name):
        raise ConfigError(f"--name {site.name!r}: letters, digits and . _ - only, 63 at most")
    if site.advertise is not None:
        host_of(site.advertise)
    if site.advertise is None and host_of(site.listen) in EVERYWHERE:
        raise ConfigError(
            f"--listen {site.listen}: others need an address they can reach: add --advertise host:port"
        )
    daemon = await join(site, GrpcTransport())
    progress = daemon.progress()
    print(f"the run is finished; the final model: {site.final_model}")
    if out is not None:
        fields = {
            "name": site.name,
            "tokens": progress.tokens,
            "inner_steps": progress.steps,
            "compute_s": progress.compute_s,
            "wait_s": progress.wait_s,
            "model": str(site.final_model),
        }
        write_atomically(out, json.dumps(fields).encode())
