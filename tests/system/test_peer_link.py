"""A link over real gRPC: what is cancelled on it does not break it."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from node.peer_links import Link
from protocol.grpc_transport import GrpcTransport
from protocol.messages import IslandId
from protocol.transport import Stream


@pytest.mark.parametrize("side", ["dialling", "accepting"])
def test_a_cancelled_send_leaves_the_link_whole(side: Literal["dialling", "accepting"]) -> None:
    """The reader begins only after a sender that was blocked by it has been cancelled."""

    async def main() -> None:
        transport, accepted = GrpcTransport(), asyncio.Queue[Stream]()
        over = asyncio.Event()

        async def handler(stream: Stream) -> None:
            await stream.receive()
            accepted.put_nowait(stream)
            await over.wait()

        server = await transport.serve("127.0.0.1:0", {}, {"Peer/Exchange": handler})
        connection = await transport.connect(server.address)
        dialled = await connection.stream("Peer/Exchange")
        await dialled.send(b"hello")
        other = await accepted.get()
        writer, reader = (dialled, other) if side == "dialling" else (other, dialled)
        link = Link(IslandId(b"x" * 32), writer)
        sent = 0

        async def fill() -> None:
            nonlocal sent
            while True:
                await link.send(bytes(1 << 20))
                sent += 1

        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(fill(), 1.0)
            last = asyncio.create_task(link.send(b"last"))
            sizes = []
            async with asyncio.timeout(20):
                while (message := await reader.receive()) != b"last":
                    assert message is not None
                    sizes.append(len(message))
            await last
            assert sizes == [1 << 20] * (sent + 1)
        finally:
            over.set()
            await connection.close()
            await server.close()

    asyncio.run(main())
