"""A transport behind a slow line: every message waits for its bits to pass, then for the delay.

Wraps any transport. One island has one uplink and one downlink, shared by all its calls and streams;
messages queue for them in order. The sender is held back while its bits pass, not while they travel.
Product code never knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from atoll.simulator.scenario import Link
from protocol.errors import AtollError, StreamClosed
from protocol.transport import CallHandler, Connection, Server, Stream, StreamHandler, Transport

_IN_FLIGHT_MESSAGES = 64


class _Line:
    """One direction of an island's line: bits pass one after the other."""

    def __init__(self, rate_bps: float, delay_s: float) -> None:
        self._rate_bps, self.delay_s = rate_bps, delay_s
        self._free_at_s = 0.0

    def reserve(self, size_bytes: int) -> float:
        """When the last bit of a message handed over now has passed."""
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s) + 8 * size_bytes / self._rate_bps
        return self._free_at_s

    async def passed(self, size_bytes: int) -> None:
        await _sleep_until(self.reserve(size_bytes))


async def _sleep_until(when_s: float) -> None:
    await asyncio.sleep(max(0.0, when_s - asyncio.get_running_loop().time()))


class ShapedTransport:
    def __init__(self, inner: Transport, link: Link) -> None:
        self._inner = inner
        self._up = _Line(link.up_bps, link.delay_s)
        self._down = _Line(link.down_bps, link.delay_s)

    async def serve(
        self, address: str, calls: Mapping[str, CallHandler], streams: Mapping[str, StreamHandler]
    ) -> Server:
        return await self._inner.serve(
            address,
            {name: self._shaped_call(handler) for name, handler in calls.items()},
            {name: self._shaped_stream(handler) for name, handler in streams.items()},
        )

    async def connect(self, address: str) -> Connection:
        return _ShapedConnection(await self._inner.connect(address), self._up, self._down)

    def _shaped_call(self, handler: CallHandler) -> CallHandler:
        async def shaped(request: bytes) -> bytes:
            await self._down.passed(len(request))
            await asyncio.sleep(self._down.delay_s)
            answer = await handler(request)
            await self._up.passed(len(answer))
            await asyncio.sleep(self._up.delay_s)
            return answer

        return shaped

    def _shaped_stream(self, handler: StreamHandler) -> StreamHandler:
        async def shaped(stream: Stream) -> None:
            pipe = _ShapedStream(stream, self._up, self._down)
            try:
                await handler(pipe)
                await pipe.flush()
            finally:
                await pipe.close()

        return shaped


class _ShapedConnection:
    def __init__(self, inner: Connection, up: _Line, down: _Line) -> None:
        self._inner, self._up, self._down = inner, up, down
        self._streams: list[_ShapedStream] = []

    async def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        await self._up.passed(len(request))
        await asyncio.sleep(self._up.delay_s)
        answer = await self._inner.call(method, request, timeout_s)
        await self._down.passed(len(answer))
        await asyncio.sleep(self._down.delay_s)
        return answer

    async def stream(self, method: str) -> Stream:
        stream = _ShapedStream(await self._inner.stream(method), self._up, self._down)
        self._streams.append(stream)
        return stream

    async def close(self) -> None:
        for stream in self._streams:
            await stream.close()
        await self._inner.close()


class _ShapedStream:
    """Messages under way wait in a queue; one task per direction hands them over at their time."""

    def __init__(self, inner: Stream, up: _Line, down: _Line) -> None:
        self._inner, self._up, self._down = inner, up, down
        self._leaving: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_FLIGHT_MESSAGES)
        self._arriving: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(
            _IN_FLIGHT_MESSAGES
        )
        self._broken: AtollError | None = None
        self._tasks = [asyncio.create_task(self._send_on()), asyncio.create_task(self._take_in())]

    async def send(self, message: bytes) -> None:
        if self._broken is not None:
            raise StreamClosed(str(self._broken))
        passed_s = self._up.reserve(len(message))
        await self._leaving.put((passed_s + self._up.delay_s, message))
        await _sleep_until(passed_s)

    async def receive(self) -> bytes | None:
        when_s, message = await self._arriving.get()
        await _sleep_until(when_s)
        if message is None and self._broken is not None:
            raise StreamClosed(str(self._broken))
        return message

    async def flush(self) -> None:
        await self._leaving.join()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.close()

    async def _send_on(self) -> None:
        while True:
            when_s, message = await self._leaving.get()
            await _sleep_until(when_s)
            try:
                if self._broken is None:
                    await self._inner.send(message)
            except AtollError as error:
                self._broken = error
            finally:
                self._leaving.task_done()

    async def _take_in(self) -> None:
        message: bytes | None = b""
        while message is not None:
            try:
                message = await self._inner.receive()
            except AtollError as error:
                self._broken, message = error, None
            size = len(message) if message is not None else 0
            await self._arriving.put((self._down.reserve(size) + self._down.delay_s, message))
