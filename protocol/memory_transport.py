"""The whole network inside one event loop: for tests of everything that speaks through a Transport.

Messages arrive in order, at once, with the same flow control and the same three errors as the real
transport. Delay and rate come from wrapping it in a shaped transport; time from a VirtualTimeLoop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from protocol.errors import AddressInUse, AtollError, PeerUnreachable, StreamClosed
from protocol.transport import CallHandler, Connection, Server, Stream, StreamHandler

_QUEUED_MESSAGES = 16


class MemoryNetwork:
    """The addresses of one little world; closing a server breaks its streams, as a crash does."""

    def __init__(self) -> None:
        self.servers: dict[str, _MemoryServer] = {}
        self._next_port = 1

    def free_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def transport(self) -> MemoryTransport:
        return MemoryTransport(self)


class MemoryTransport:
    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

    async def serve(
        self,
        address: str,
        calls: Mapping[str, CallHandler],
        streams: Mapping[str, StreamHandler],
    ) -> Server:
        host, _, port = address.rpartition(":")
        address = f"{host}:{self._network.free_port() if port == '0' else port}"
        if address in self._network.servers:
            raise AddressInUse(f"{address}: another server listens there; choose another port")
        server = _MemoryServer(self._network, address, calls, streams)
        self._network.servers[address] = server
        return server

    async def connect(self, address: str) -> Connection:
        return _MemoryConnection(self._network, address)


class _MemoryServer:
    def __init__(
        self,
        network: MemoryNetwork,
        address: str,
        calls: Mapping[str, CallHandler],
        streams: Mapping[str, StreamHandler],
    ) -> None:
        self._network, self.address, self.calls, self.streams = network, address, calls, streams
        self._open: set[tuple[asyncio.Task[None], _Pipe, _Pipe]] = set()

    def accept(self, handler: StreamHandler) -> Stream:
        up, down = _Pipe(), _Pipe()

        async def run() -> None:
            try:
                await handler(_MemoryStream(down, up))
            except AtollError:
                down.break_off()
            finally:
                down.end()
                up.break_off()

        task = asyncio.get_running_loop().create_task(run())
        entry = (task, up, down)
        self._open.add(entry)
        task.add_done_callback(lambda _: self._open.discard(entry))
        return _MemoryStream(up, down)

    async def close(self) -> None:
        self._network.servers.pop(self.address, None)
        tasks = []
        for task, up, down in list(self._open):
            up.break_off()
            down.break_off()
            task.cancel()
            tasks.append(task)
        await asyncio.gather(*tasks, return_exceptions=True)


class _MemoryConnection:
    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network, self._address = network, address

    def _server(self) -> _MemoryServer:
        server = self._network.servers.get(self._address)
        if server is None:
            raise PeerUnreachable(f"{self._address}: nobody answers: is it running, and reachable?")
        return server

    async def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        handler = self._server().calls.get(method)
        if handler is None:
            raise StreamClosed(f"{self._address}: UNIMPLEMENTED: {method}")
        try:
            async with asyncio.timeout(timeout_s):
                return await handler(request)
        except TimeoutError:
            raise PeerUnreachable(f"{self._address}: no answer within {timeout_s} s") from None

    async def stream(self, method: str) -> Stream:
        server = self._server()
        if method not in server.streams:
            raise StreamClosed(f"{self._address}: UNIMPLEMENTED: {method}")
        return server.accept(server.streams[method])

    async def close(self) -> None:
        pass


class _Pipe:
    """One direction: a bounded queue that can end (None) or break off."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._changed = asyncio.Condition()
        self._ended = self._broken = False

    async def put(self, message: bytes) -> None:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._broken or self._ended or len(self._messages) < _QUEUED_MESSAGES
            )
            if self._broken or self._ended:
                raise StreamClosed("the stream broke off")
            self._messages.append(message)
            self._changed.notify_all()

    async def get(self) -> bytes | None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._broken or self._ended or self._messages)
            if self._messages:
                message = self._messages.pop(0)
                self._changed.notify_all()
                return message
            if self._broken:
                raise StreamClosed("the stream broke off")
            return None

    def end(self) -> None:
        self._ended = True
        self._wake()

    def break_off(self) -> None:
        self._broken = True
        self._wake()

    def _wake(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._waking = asyncio.get_running_loop().create_task(notify())


class _MemoryStream:
    def __init__(self, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._outgoing, self._incoming = outgoing, incoming

    async def send(self, message: bytes) -> None:
        await self._outgoing.put(message)

    async def receive(self) -> bytes | None:
        return await self._incoming.get()

    async def close(self) -> None:
        self._outgoing.end()
