"""The real transport: grpc.aio with identity serializers, one method per call or stream.

The only file that knows grpc: its errors are mapped to the project's here, at one edge. Plaintext until
runs have tickets and certificates; contributions, sums and votes prove themselves by digest and
signature already. One channel per connection; gRPC's own flow control and window follow the line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio

from protocol.errors import (
    AddressInUse,
    AtollError,
    BadFrame,
    PeerUnreachable,
    StreamClosed,
)
from protocol.frames import MAX_MESSAGE_BYTES
from protocol.transport import CallHandler, Connection, Server, Stream, StreamHandler, host_of

_PREFIX = "/atoll.v1."
# What grpc.aio raises when the other side has gone: on a server its own InternalError, not an RpcError.
_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a taken port is an error, never shared silently
    ("grpc.enable_http_proxy", 0),  # a web proxy in the environment is not for peers
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
]


class GrpcTransport:
    async def serve(
        self,
        address: str,
        calls: Mapping[str, CallHandler],
        streams: Mapping[str, StreamHandler],
    ) -> Server:
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((_Methods(calls, streams),))
        host = host_of(address)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError:
            port = 0
        if not port:
            raise AddressInUse(
                f"{address}: cannot listen there: another process holds the port, or the host name is "
                "not one of this machine; choose another, or port 0 for a free one"
            )
        await server.start()
        return _GrpcServer(server, f"{host}:{port}")

    async def connect(self, address: str) -> Connection:
        host_of(address)
        return _GrpcConnection(address, grpc.aio.insecure_channel(address, options=_OPTIONS))


class _GrpcServer:
    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self._server = server
        self.address = address

    async def close(self) -> None:
        await self._server.stop(grace=None)


class _Methods(grpc.GenericRpcHandler):
    def __init__(
        self, calls: Mapping[str, CallHandler], streams: Mapping[str, StreamHandler]
    ) -> None:
        self._calls, self._streams = calls, streams

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.removeprefix(_PREFIX)
        if name in self._calls:
            return grpc.unary_unary_rpc_method_handler(_call_behaviour(self._calls[name]))
        if name in self._streams:
            return grpc.stream_stream_rpc_method_handler(_stream_behaviour(self._streams[name]))
        return None


def _call_behaviour(handler: CallHandler) -> Any:
    async def behaviour(request: bytes, context: Any) -> bytes:
        try:
            return await handler(request)
        except AtollError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort returns never") from None

    return behaviour


def _stream_behaviour(handler: StreamHandler) -> Any:
    async def behaviour(_requests: Any, context: Any) -> None:
        try:
            await handler(_ServerStream(context))
        except StreamClosed:
            return
        except AtollError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return behaviour


class _ServerStream:
    def __init__(self, context: Any) -> None:
        self._context = context

    async def send(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except _BROKEN as error:
            raise StreamClosed(f"the peer hung up: {error}") from None

    async def receive(self) -> bytes | None:
        try:
            message = await self._context.read()
        except _BROKEN as error:
            raise StreamClosed(f"the peer hung up: {error}") from None
        return None if message is grpc.aio.EOF else message

    async def close(self) -> None:
        """The server's direction ends when its handler returns."""


class _GrpcConnection:
    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self._address, self._channel = address, channel
        self._closed = False

    async def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        try:
            stub: Any = self._channel.unary_unary(_PREFIX + method)
            answer: bytes = await stub(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _mapped(error, self._address) from None
        except grpc.aio.UsageError as error:
            raise PeerUnreachable(f"{self._address}: {error}") from None
        except asyncio.CancelledError:
            _raise_if_closed(self._closed, self._address)
            raise
        return answer

    async def stream(self, method: str) -> Stream:
        try:
            call: Any = self._channel.stream_stream(_PREFIX + method)()
        except grpc.aio.UsageError as error:
            raise PeerUnreachable(f"{self._address}: {error}") from None
        return _ClientStream(self._address, call)

    async def close(self) -> None:
        self._closed = True
        await self._channel.close()


class _ClientStream:
    def __init__(self, address: str, call: Any) -> None:
        self._address, self._call, self._closed = address, call, False

    async def send(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise _mapped(error, self._address) from None
        except _BROKEN as error:
            raise StreamClosed(f"{self._address}: the stream is closed: {error}") from None
        except asyncio.CancelledError:
            _raise_if_closed(self._closed or self._call.cancelled(), self._address)
            raise

    async def receive(self) -> bytes | None:
        try:
            message = await self._call.read()
            if message is not grpc.aio.EOF:
                return bytes(message)
            code = await self._call.code()
        except grpc.aio.AioRpcError as error:
            raise _mapped(error, self._address) from None
        except asyncio.CancelledError:
            _raise_if_closed(self._closed or self._call.cancelled(), self._address)
            raise
        if code is not grpc.StatusCode.OK:
            raise StreamClosed(f"{self._address}: {code.name}: {await self._call.details()}")
        return None

    async def close(self) -> None:
        self._closed = True
        if not self._call.done():
            self._call.cancel()


def _raise_if_closed(closed: bool, address: str) -> None:
    """grpc tells a call that was closed by CancelledError, as if it were the task that was cancelled."""
    task = asyncio.current_task()
    if closed and not (task is not None and task.cancelling()):
        raise StreamClosed(f"{address}: closed on this side")


def _mapped(error: grpc.aio.AioRpcError, address: str) -> AtollError:
    code, detail = error.code(), error.details() or ""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return BadFrame(f"{address}: {detail}")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return PeerUnreachable(
            f"{address}: nobody answers ({detail}): is it running, and reachable?"
        )
    return StreamClosed(f"{address}: {code.name}: {detail}")
