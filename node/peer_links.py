"""One stream per pair of islands, opened by either side, kept alive as long as both are there.

Of two islands that can both be dialled, the one with the smaller id dials; one without an address always
dials. A link that breaks is opened again; whoever was using it learns so from `Link.lost` and starts his
conversation afresh (everything said on a link may be said again).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from protocol import atoll_peer_pb2 as pb
from protocol.errors import AtollError, BadFrame, ConfigError, StreamClosed, TransportError
from protocol.frames import Frame, FrameKind, decode_frame, encode_frame
from protocol.identity import short
from protocol.messages import IslandId
from protocol.transport import Connection, Stream, Transport
from protocol.wire import parse

log = structlog.get_logger()

_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.1, 2.0

OnFrame = Callable[[IslandId, Frame], None]


class Link:
    """A live stream to one island."""

    def __init__(self, island: IslandId, stream: Stream) -> None:
        self.island, self._stream = island, stream
        self.lost = asyncio.Event()
        self._sending = asyncio.Lock()

    async def send(self, frame: bytes) -> None:
        """Raises TransportError if the link is gone.

        What was begun is sent, also when the caller is cancelled: a cancelled write breaks a gRPC stream.
        """
        await asyncio.shield(self._send(frame))

    async def _send(self, frame: bytes) -> None:
        async with self._sending:
            if self.lost.is_set():
                raise StreamClosed("the link is gone")
            await self._stream.send(frame)

    async def receive(self) -> Frame | None:
        message = await self._stream.receive()
        return None if message is None else decode_frame(message)

    async def close(self) -> None:
        self.lost.set()
        await self._stream.close()


class PeerLinks:
    """`on_frame` is called for every frame, in the order of its link; it must not wait."""

    def __init__(self, transport: Transport, run_id: str, me: IslandId, on_frame: OnFrame) -> None:
        self._transport, self._run_id, self._me, self._on_frame = transport, run_id, me, on_frame
        self._links: dict[IslandId, Link] = {}
        self._changed = asyncio.Condition()
        self._addresses: dict[IslandId, str] = {}
        self._dialling: dict[IslandId, tuple[str, asyncio.Task[None]]] = {}
        self._begun = self._resting = False

    def set_peers(self, addresses: dict[IslandId, str]) -> None:
        """Where islands are now ('' = cannot be dialled). Whoever was heard of once stays known."""
        self._addresses |= addresses
        if self._begun:
            self._dial_ours()

    def begin(self) -> None:
        """Opens the links that are ours to open, from now on."""
        self._begun = True
        self._dial_ours()

    @property
    def others(self) -> list[str]:
        """Addresses of all other islands, in order of their ids."""
        return [a for i, a in sorted(self._addresses.items()) if a and i != self._me]

    def _dial_ours(self) -> None:
        for island, address in self._addresses.items():
            ours = address and (self._me < island or not self._addresses.get(self._me, ""))
            known, task = self._dialling.get(island, ("", None))
            if island == self._me or not ours or (known == address and task and not task.done()):
                continue
            if task is not None:
                task.cancel()
            dialling = asyncio.create_task(self._keep_dialling(island, address))
            self._dialling[island] = address, dialling

    async def link(self, island: IslandId) -> Link:
        """Waits for a live link."""
        async with self._changed:
            await self._changed.wait_for(lambda: island in self._links)
            return self._links[island]

    async def serve(self, stream: Stream) -> None:
        """Handler of `Peer/Exchange`: somebody dialled us."""
        first = await stream.receive()
        frame = decode_frame(first or b"")
        if frame.kind is not FrameKind.HELLO:
            raise BadFrame("the first frame of a stream must say who is speaking")
        hello = parse(pb.PeerHello, bytes(frame.payload))
        if hello.run_id != self._run_id:
            raise BadFrame(f"this island is in run {self._run_id}, not {hello.run_id}")
        if hello.island not in self._addresses:
            raise BadFrame("not an island of this run, or not heard of yet: dial again")
        await self._run(Link(IslandId(hello.island), stream))

    async def drop(self, island: IslandId) -> None:
        """Both sides begin anew on the next link."""
        link = self._links.get(island)
        if link is not None:
            await self._unregister(link)

    def stop_dialling(self) -> None:
        """No link that breaks from now on is opened again by us."""
        self._resting = True

    async def close(self) -> None:
        tasks = [task for _, task in self._dialling.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in list(self._links.values()):
            await link.close()

    async def _keep_dialling(self, island: IslandId, address: str) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._resting:
            connection: Connection | None = None
            try:
                connection = await self._transport.connect(address)
                if await self._dial(island, connection):
                    backoff_s = _FIRST_BACKOFF_S
            except (TransportError, ConfigError) as error:
                if self._resting:
                    return
                log.warning("link_lost", peer=short(island), reason=str(error), retry_s=backoff_s)
            finally:
                if connection is not None:
                    await connection.close()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _dial(self, island: IslandId, connection: Connection) -> bool:
        stream = await connection.stream("Peer/Exchange")
        hello = pb.PeerHello(run_id=self._run_id, island=self._me)
        await stream.send(encode_frame(FrameKind.HELLO, hello.SerializeToString()))
        return await self._run(Link(island, stream))

    async def _run(self, link: Link) -> bool:
        """Reads a link until it ends; True if at least one frame came."""
        heard = False
        try:
            await self._register(link)
            while (frame := await self._next(link)) is not None:
                heard = True
                self._on_frame(link.island, frame)
        except BadFrame as error:
            log.error("bad_frame", peer=short(link.island), reason=str(error))
            raise
        finally:
            await self._unregister(link)
        return heard

    async def _next(self, link: Link) -> Frame | None:
        """The next frame; None at the end of the stream, and when the link is dropped on this side."""
        frame = asyncio.ensure_future(link.receive())
        lost = asyncio.ensure_future(link.lost.wait())
        try:
            await asyncio.wait({frame, lost}, return_when=asyncio.FIRST_COMPLETED)
            return frame.result() if frame.done() else None
        finally:
            frame.cancel()
            lost.cancel()
            await asyncio.gather(frame, lost, return_exceptions=True)

    async def _register(self, link: Link) -> None:
        old = self._links.get(link.island)
        self._links[link.island] = link
        if old is not None:
            await old.close()
        async with self._changed:
            self._changed.notify_all()

    async def _unregister(self, link: Link) -> None:
        if self._links.get(link.island) is link:
            del self._links[link.island]
        try:
            await link.close()
        except AtollError as error:
            log.debug("close_failed", peer=short(link.island), reason=str(error))
