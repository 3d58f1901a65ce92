"""How messages move: calls and streams of whole messages between addresses.

Two implementations with the same meaning: `GrpcTransport` for real networks and `MemoryTransport` for
one process in virtual time. Whoever uses a transport sees bytes, addresses and three errors:
PeerUnreachable (nobody there), StreamClosed (broke off), BadFrame (not what the protocol says).

A message is at most MAX_MESSAGE_BYTES. `send` returns once flow control has taken the message, so a
slow receiver slows its sender and nothing piles up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from protocol.errors import ConfigError

_LAST_PORT = 65_535


class Stream(Protocol):
    """Both directions are open at once; each keeps its order."""

    async def send(self, message: bytes) -> None:
        """Raises StreamClosed when the other side is gone."""

    async def receive(self) -> bytes | None:
        """The next message, or None once the other side has closed its direction.

        Raises StreamClosed when the stream broke off instead."""

    async def close(self) -> None:
        """Ends the stream from this side: nothing more is sent or wanted, what is under way may be lost.

        A receive that waits ends with StreamClosed or None. Safe to call twice."""


class Connection(Protocol):
    async def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """One request, one answer. Raises PeerUnreachable, also when it takes too long."""

    async def stream(self, method: str) -> Stream: ...

    async def close(self) -> None: ...


class Server(Protocol):
    address: str

    async def close(self) -> None:
        """Stops listening and ends every open stream."""


CallHandler = Callable[[bytes], Awaitable[bytes]]
StreamHandler = Callable[[Stream], Awaitable[None]]


class Transport(Protocol):
    async def serve(
        self,
        address: str,
        calls: Mapping[str, CallHandler],
        streams: Mapping[str, StreamHandler],
    ) -> Server:
        """Listens at `host:port`; port 0 takes a free one. Raises AddressInUse."""

    async def connect(self, address: str) -> Connection:
        """Cheap: the first call or stream finds out whether anybody is there."""


def host_of(address: str) -> str:
    """Raises ConfigError unless the address is host:port with a port of 0 to 65535."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > _LAST_PORT:
        raise ConfigError(f"{address}: an address is host:port, with a port of 0 to {_LAST_PORT}")
    return host
