"""Counts what an island sends and receives, each byte of each message once, retries included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.transport import CallHandler, Connection, Server, Stream, StreamHandler, Transport


@dataclass
class Traffic:
    sent_bytes: int = 0
    received_bytes: int = 0


class MeteredTransport:
    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.traffic = Traffic()

    async def serve(
        self, address: str, calls: Mapping[str, CallHandler], streams: Mapping[str, StreamHandler]
    ) -> Server:
        return await self._inner.serve(
            address,
            {name: self._counted_call(handler) for name, handler in calls.items()},
            {name: self._counted_stream(handler) for name, handler in streams.items()},
        )

    async def connect(self, address: str) -> Connection:
        return _MeteredConnection(await self._inner.connect(address), self.traffic)

    def _counted_call(self, handler: CallHandler) -> CallHandler:
        async def counted(request: bytes) -> bytes:
            self.traffic.received_bytes += len(request)
            answer = await handler(request)
            self.traffic.sent_bytes += len(answer)
            return answer

        return counted

    def _counted_stream(self, handler: StreamHandler) -> StreamHandler:
        async def counted(stream: Stream) -> None:
            await handler(_MeteredStream(stream, self.traffic))

        return counted


class _MeteredConnection:
    def __init__(self, inner: Connection, traffic: Traffic) -> None:
        self._inner, self._traffic = inner, traffic

    async def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        self._traffic.sent_bytes += len(request)
        answer = await self._inner.call(method, request, timeout_s)
        self._traffic.received_bytes += len(answer)
        return answer

    async def stream(self, method: str) -> Stream:
        return _MeteredStream(await self._inner.stream(method), self._traffic)

    async def close(self) -> None:
        await self._inner.close()


class _MeteredStream:
    def __init__(self, inner: Stream, traffic: Traffic) -> None:
        self._inner, self._traffic = inner, traffic

    async def send(self, message: bytes) -> None:
        await self._inner.send(message)
        self._traffic.sent_bytes += len(message)

    async def receive(self) -> bytes | None:
        message = await self._inner.receive()
        self._traffic.received_bytes += len(message) if message is not None else 0
        return message

    async def close(self) -> None:
        await self._inner.close()
