"""`atoll run start` = the coordinator and what joiners need: a donor of the start state beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from coordinator.coordinator import Coordinator, layout_of
from coordinator.service import serve_run
from node.start_donor import StartDonor
from protocol.errors import ConfigError
from protocol.grpc_transport import GrpcTransport
from protocol.run_files import load_run, run_directory
from protocol.state_dir import write_atomically


async def start_run(
    run_path: Path, state: Path, listen: str, on_listening: Callable[[str, str], None]
) -> None:
    """`on_listening(address, run_id)` is called once both are up."""
    run = load_run(run_path)
    start_state = run_directory(run_path).start_state
    if not start_state.exists():
        raise ConfigError(
            f"{start_state}: missing: restore it, or make a new run with `atoll run init`"
        )
    transport = GrpcTransport()
    host = listen.rpartition(":")[0]
    donor = StartDonor(run.start, layout_of(run), start_state)
    server = await donor.serve(transport, f"{host}:0")

    def listening(address: str, coordinator: Coordinator) -> None:
        on_listening(address, coordinator.chain.run_id)

    try:
        await serve_run(run_path, state, listen, transport, listening, [server.address])
    finally:
        await server.close()


def write_listening(path: Path, address: str, run_id: str) -> None:
    write_atomically(path, json.dumps({"address": address, "run_id": run_id}).encode())
