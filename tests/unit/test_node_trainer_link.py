"""The daemon's end of the trainer socket: real unix sockets, real descriptors, both ends in one process."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.edge_link import DaemonLost, EdgeLink
from node.edge_messages import (
    Boundary,
    Buffers,
    Follow,
    GoOn,
    Hello,
    Message,
    Refused,
    Stop,
    encode,
)
from node.shared_buffer import SharedBuffer
from node.trainer_link import TrainerLink
from protocol.layout import TensorLayout

LAYOUT = (TensorLayout("weight", (3,), "float32"),)
VALUES = 3


class Desk:
    """A link at work, and what it has been told; `None` = the present trainer has gone."""

    def __init__(self, link: TrainerLink) -> None:
        self.link = link
        self.inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self._clients: list[EdgeLink] = []

    def client(self) -> EdgeLink:
        self._clients.append(EdgeLink(self.link.path))
        return self._clients[-1]

    async def greeted(self, incarnation: str) -> EdgeLink:
        """A trainer whose Hello has been heard."""
        client = self.client()
        client.send(Hello(incarnation, os.getpid(), LAYOUT))
        heard = await self.inbox.get()
        assert isinstance(heard, Hello)
        assert heard.incarnation == incarnation
        return client

    async def present(
        self, incarnation: str, message: Message, descriptors: Sequence[int] = ()
    ) -> EdgeLink:
        """A trainer that has been turned to and has got `message`."""
        client = await self.greeted(incarnation)
        self.link.turn_to(incarnation)
        await self.link.send(message, descriptors)
        assert await received(client) == message
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()


@asynccontextmanager
async def at_work(folder: Path) -> AsyncIterator[Desk]:
    desk = Desk(TrainerLink(folder))
    serving = asyncio.create_task(desk.link.run(desk.inbox.put_nowait))
    try:
        yield desk
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        desk.close()
        desk.link.close()


async def received(client: EdgeLink) -> Message:
    return await asyncio.to_thread(client.receive)


async def ended(connection: socket.socket) -> bool:
    """Waits for the other end to close."""
    return await asyncio.to_thread(connection.recv, 1) == b""


def in_a_loop(
    test: Callable[[Path], Coroutine[Any, Any, None]],
) -> Callable[[Path], None]:
    @wraps(test)
    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path))

    return run


@in_a_loop
async def test_ranks_that_follow_share_the_memory_of_the_first(tmp_path: Path) -> None:
    buffers = [SharedBuffer.create("test", VALUES) for _ in range(3)]
    async with at_work(tmp_path) as desk:
        first = await desk.present("life", GoOn(0, 1, 0), [buffer.fd for buffer in buffers])
        ranks = [first]
        for rank in (1, 2):
            client = desk.client()
            client.send(Follow(rank, "life"))
            assert await received(client) == Buffers(3)
            ranks.append(client)
        seen = [
            [SharedBuffer.open(fd, VALUES) for fd in client.take_descriptors(3)] for client in ranks
        ]
        for number in range(3):
            buffers[number].values[:] = number
            for rank, own in enumerate(seen):
                assert own[number].values[rank] == number
                own[number].values[rank] = 10 * number + rank
            np.testing.assert_array_equal(
                buffers[number].values, 10 * number + np.arange(3, dtype=np.float32)
            )
        assert desk.inbox.empty()  # the daemon does not hear of ranks
        for buffer in (*buffers, *(buffer for own in seen for buffer in own)):
            buffer.close()


@in_a_loop
async def test_more_descriptors_than_one_call_takes_arrive_in_order(tmp_path: Path) -> None:
    buffers = [SharedBuffer.create("test", VALUES) for _ in range(450)]
    for number, buffer in enumerate(buffers):
        buffer.values[:] = number
    async with at_work(tmp_path) as desk:
        await desk.present("life", GoOn(0, 1, 0), [buffer.fd for buffer in buffers])
        follower = desk.client()
        follower.send(Follow(1, "life"))
        assert await received(follower) == Buffers(450)
        taken = [SharedBuffer.open(fd, VALUES) for fd in follower.take_descriptors(450)]
        assert [int(buffer.values[0]) for buffer in taken] == list(range(450))
        for buffer in (*buffers, *taken):
            buffer.close()


@in_a_loop
async def test_a_rank_of_another_trainer_gets_no_memory(tmp_path: Path) -> None:
    buffer = SharedBuffer.create("test", VALUES)
    async with at_work(tmp_path) as desk:
        await desk.present("life", GoOn(0, 1, 0), [buffer.fd])
        stranger = desk.client()
        stranger.send(Follow(1, "another life"))
        assert await received(stranger) == Refused("this daemon serves another trainer")
        buffer.close()


@in_a_loop
async def test_answers_go_to_the_old_trainer_until_the_daemon_turns_to_the_new_one(
    tmp_path: Path,
) -> None:
    async with at_work(tmp_path) as desk:
        old = await desk.present("old", GoOn(1, 1, 0))
        new = await desk.greeted("new")
        await desk.link.send(GoOn(2, 2, 0))
        assert await received(old) == GoOn(2, 2, 0)
        desk.link.turn_to("new")
        await desk.link.send(GoOn(3, 3, 0))
        assert await received(new) == GoOn(3, 3, 0)


@in_a_loop
async def test_the_end_of_an_old_trainer_is_not_the_end_of_the_new_one(tmp_path: Path) -> None:
    async with at_work(tmp_path) as desk:
        old = await desk.present("old", GoOn(1, 1, 0))
        new = await desk.present("new", GoOn(2, 2, 0))
        old.close()
        third = await desk.greeted("third")  # so the loop has had the end of the old one
        assert desk.inbox.empty()
        await desk.link.send(GoOn(3, 3, 0))
        assert await received(new) == GoOn(3, 3, 0)
        new.close()
        assert await desk.inbox.get() is None
        desk.link.turn_to("third")
        await desk.link.send(GoOn(4, 4, 0))
        assert await received(third) == GoOn(4, 4, 0)


@in_a_loop
async def test_a_trainer_that_another_has_replaced_is_heard_no_more_and_cut_off(
    tmp_path: Path,
) -> None:
    async with at_work(tmp_path) as desk:
        old = await desk.present("old", GoOn(1, 1, 0))
        new = await desk.present("new", GoOn(2, 2, 0))
        with suppress(DaemonLost):
            old.send(Boundary(1, "old", 0, 5, 640, 5, 2.5, 0.25, 0.0))
        new.send(Boundary(1, "new", 0, 5, 640, 5, 2.5, 0.25, 0.0))
        heard = await desk.inbox.get()
        assert isinstance(heard, Boundary)
        assert heard.incarnation == "new"
        with pytest.raises(DaemonLost):
            await received(old)


@in_a_loop
async def test_a_trainer_that_has_gone_before_its_answer_is_not_answered(tmp_path: Path) -> None:
    async with at_work(tmp_path) as desk:
        (await desk.greeted("hasty")).close()
        await desk.greeted("next")
        desk.link.turn_to("hasty")
        await desk.link.send(Stop("nobody hears this"))
        last = await desk.present("last", GoOn(1, 1, 0))
        last.close()
        assert await desk.inbox.get() is None


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n",
        b"\n",
        b"[]\n",
        b'{"type":"Hello"}\n',
        b'{"type":"Launch"}\n',
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        encode(Follow(1, "life"))[:-2] + b"\n",
    ],
    ids=["http", "empty", "list", "fields missing", "unknown", "not text", "deep", "cut off"],
)
def test_garbage_closes_its_own_connection_only(garbage: bytes, tmp_path: Path) -> None:
    async def story() -> None:
        async with at_work(tmp_path) as desk:
            trainer = await desk.present("life", GoOn(1, 1, 0))
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(desk.link.path)
                stranger.sendall(garbage)
                assert await ended(stranger)
            assert desk.inbox.empty()
            await desk.link.send(GoOn(2, 2, 0))
            assert await received(trainer) == GoOn(2, 2, 0)

    asyncio.run(story())


@in_a_loop
async def test_garbage_from_the_trainer_is_its_end(tmp_path: Path) -> None:
    async with at_work(tmp_path) as desk:
        with socket.socket(socket.AF_UNIX) as trainer:
            trainer.connect(desk.link.path)
            trainer.sendall(encode(Hello("life", os.getpid(), LAYOUT)))
            assert isinstance(await desk.inbox.get(), Hello)
            desk.link.turn_to("life")
            trainer.sendall(b"garbage\n")
            assert await desk.inbox.get() is None
            assert await ended(trainer)


@in_a_loop
async def test_the_socket_is_the_owners_alone_and_goes_with_the_link(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    paths = []
    for folder in (tmp_path, long):
        async with at_work(folder) as desk:
            path = Path(desk.link.path)
            paths.append(path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            await desk.present("life", GoOn(1, 1, 0))
    assert paths[0].parent == tmp_path
    assert not any(path.exists() for path in paths)
    assert not paths[1].parent.exists()  # a path too long for the kernel gets a folder of its own
