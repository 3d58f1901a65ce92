"""`atoll run start` = the coordinator and what joiners need: the start state, served at the same address."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from coordinator.coordinator import layout_of
from coordinator.service import serve_run
from node.start_donor import StartDonor
from protocol.errors import ConfigError
from protocol.grpc_transport import GrpcTransport
from protocol.run_files import load_run, run_directory
from protocol.state_dir import write_atomically

OnListening = Callable[[str, str], None]
"""on_listening(address, run_id) is called once others can come."""


async def start_run(run_path: Path, state: Path, listen: str, on_listening: OnListening) -> None:
    donor = _donor(run_path)
    await serve_run(run_path, state, listen, GrpcTransport(), on_listening, streams=donor.streams)


async def donate_start(run_path: Path, listen: str, on_listening: OnListening) -> None:
    """The start state alone, for a coordinator that runs elsewhere; until cancelled."""
    server = await GrpcTransport().serve(listen, {}, _donor(run_path).streams)
    try:
        on_listening(server.address, load_run(run_path).start.run_id)
        await asyncio.Event().wait()
    finally:
        await server.close()


def _donor(run_path: Path) -> StartDonor:
    run, start_state = load_run(run_path), run_directory(run_path).start_state
    if not start_state.exists():
        raise ConfigError(
            f"{start_state}: missing: restore it, or make a new run with `atoll run init`"
        )
    return StartDonor(run.start, layout_of(run), start_state)


def write_listening(path: Path, address: str, run_id: str) -> None:
    write_atomically(path, json.dumps({"address": address, "run_id": run_id}).encode())
