"""The coordinator on a transport: four calls and a watch stream, nothing decided here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from coordinator.coordinator import Coordinator
from protocol import atoll_coordinator_pb2 as pb
from protocol.errors import BadFrame
from protocol.run_files import load_run
from protocol.state_dir import locked
from protocol.transport import Server, Stream, StreamHandler, Transport
from protocol.wire import parse

log = structlog.get_logger()

_TICK_S = 0.1
_FAREWELL_S = 15.0


class Service:
    """Binds a Coordinator to a transport."""

    def __init__(self, coordinator: Coordinator, heartbeat_s: float) -> None:
        self._coordinator, self._heartbeat_s = coordinator, heartbeat_s

    async def serve(
        self, transport: Transport, address: str, streams: Mapping[str, StreamHandler] | None = None
    ) -> Server:
        """`streams`: what else is to be had at this address."""
        calls = {
            "Coordinator/Describe": self._describe,
            "Coordinator/Register": self._register,
            "Coordinator/Post": self._post,
            "Coordinator/Status": self._status,
        }
        return await transport.serve(
            address, calls, {"Coordinator/Watch": self._watch, **(streams or {})}
        )

    async def _describe(self, request: bytes) -> bytes:
        parse(pb.DescribeRequest, request)
        return self._coordinator.describe().SerializeToString()

    async def _register(self, request: bytes) -> bytes:
        return self._coordinator.register(parse(pb.RegisterRequest, request)).SerializeToString()

    async def _post(self, request: bytes) -> bytes:
        return self._coordinator.post(parse(pb.PostRequest, request)).SerializeToString()

    async def _status(self, request: bytes) -> bytes:
        parse(pb.StatusRequest, request)
        return self._coordinator.status().SerializeToString()

    async def _watch(self, stream: Stream) -> None:
        first = await stream.receive()
        request = parse(pb.WatchRequest, first or b"")
        if request.run_id != self._coordinator.chain.run_id:
            raise BadFrame(f"this is run {self._coordinator.chain.run_id}, not {request.run_id}")
        queue = self._coordinator.hub.subscribe()
        try:
            for event in self._coordinator.history(request.from_slot):
                await stream.send(event)
            while (event_or_end := await self._next(queue)) is not None:
                await stream.send(event_or_end)
        finally:
            self._coordinator.hub.unsubscribe(queue)

    async def _next(self, queue: asyncio.Queue[bytes | None]) -> bytes | None:
        """The next event, or a beat when nothing happened for a while."""
        try:
            async with asyncio.timeout(self._heartbeat_s):
                return await queue.get()
        except TimeoutError:
            return self._coordinator.beat()


async def serve_run(
    run_path: Path,
    state: Path,
    address: str,
    transport: Transport,
    on_listening: Callable[[str, str], None],
    donors: Sequence[str] = (),
    streams: Mapping[str, StreamHandler] | None = None,
) -> None:
    """Serves one run until it is finished and everyone has said goodbye, or until cancelled.

    `on_listening(address, run_id)` is called once. `donors` serve the start state elsewhere; `streams` are
    served here besides the coordinator's own.
    """
    run = load_run(run_path)
    with locked(state):
        coordinator = Coordinator(run, state, time.monotonic, donors)
        service = Service(coordinator, run.spec.sync.heartbeat_s)
        server = await service.serve(transport, address, streams)
        log.info("listening", address=server.address, run=coordinator.chain.run_id)
        on_listening(server.address, coordinator.chain.run_id)
        try:
            await _tick_until_done(coordinator)
        finally:
            await server.close()
            coordinator.close()


async def _tick_until_done(coordinator: Coordinator) -> None:
    finished_s: float | None = None
    while not coordinator.all_gone:
        await asyncio.sleep(_TICK_S)
        coordinator.tick()
        if coordinator.chain.finished:
            finished_s = finished_s or time.monotonic()
            if time.monotonic() - finished_s > _FAREWELL_S:
                return
