"""The network in one process: calls, streams, flow control, and the three errors of the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from protocol.errors import (
    AddressInUse,
    AtollError,
    BadFrame,
    InvariantBroken,
    PeerUnreachable,
    StreamClosed,
)
from protocol.memory_transport import MemoryNetwork
from protocol.transport import CallHandler, Server, Stream, StreamHandler
from protocol.virtual_time import run_virtual

ADDRESS = "server:1000"
NEVER = 1e9


async def echo_call(request: bytes) -> bytes:
    return b"echo " + request


async def echo(stream: Stream) -> None:
    while (message := await stream.receive()) is not None:
        await stream.send(message)


async def deaf(_: Stream) -> None:
    await asyncio.sleep(NEVER)


async def serve(
    network: MemoryNetwork,
    address: str = ADDRESS,
    calls: Mapping[str, CallHandler] | None = None,
    streams: Mapping[str, StreamHandler] | None = None,
) -> Server:
    return await network.transport().serve(
        address, calls or {"Echo": echo_call}, streams or {"Echo": echo, "Deaf": deaf}
    )


async def open_stream(network: MemoryNetwork, method: str = "Echo") -> Stream:
    connection = await network.transport().connect(ADDRESS)
    return await connection.stream(method)


async def elapsed_s() -> float:
    return asyncio.get_running_loop().time()


# --- calls -------------------------------------------------------------------------------------


def test_a_call_is_answered() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        await serve(network)
        connection = await network.transport().connect(ADDRESS)
        assert await connection.call("Echo", b"x", 1.0) == b"echo x"
        await connection.close()

    run_virtual(main())


def test_nobody_there_is_found_out_at_the_first_use() -> None:
    async def main() -> None:
        connection = await MemoryNetwork().transport().connect(ADDRESS)
        with pytest.raises(PeerUnreachable, match=f"{ADDRESS}: nobody answers"):
            await connection.call("Echo", b"x", 1.0)
        with pytest.raises(PeerUnreachable):
            await connection.stream("Echo")

    run_virtual(main())


def test_a_call_without_an_answer_ends_at_its_timeout() -> None:
    async def silent(_: bytes) -> bytes:
        await asyncio.sleep(NEVER)
        return b""

    async def main() -> None:
        network = MemoryNetwork()
        await serve(network, calls={"Silent": silent})
        connection = await network.transport().connect(ADDRESS)
        with pytest.raises(PeerUnreachable, match=r"no answer within 30\.0 s"):
            await connection.call("Silent", b"", 30.0)
        assert await elapsed_s() == pytest.approx(30.0)

    run_virtual(main())


def test_an_error_of_the_handler_arrives_with_its_text() -> None:
    async def refuse(_: bytes) -> bytes:
        raise BadFrame("not what the protocol says")

    async def main() -> None:
        network = MemoryNetwork()
        await serve(network, calls={"Refuse": refuse})
        connection = await network.transport().connect(ADDRESS)
        with pytest.raises(BadFrame, match="not what the protocol says"):
            await connection.call("Refuse", b"", 1.0)

    run_virtual(main())


def test_an_unknown_method_is_an_error_of_ours_at_once() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        await serve(network)
        connection = await network.transport().connect(ADDRESS)
        with pytest.raises(StreamClosed, match=f"{ADDRESS}: UNIMPLEMENTED: Nothing"):
            await connection.call("Nothing", b"", 1.0)
        with pytest.raises(StreamClosed, match=f"{ADDRESS}: UNIMPLEMENTED: Nothing"):
            await connection.stream("Nothing")
        assert await connection.call("Echo", b"x", 1.0) == b"echo x"

    run_virtual(main())


# --- addresses ---------------------------------------------------------------------------------


def test_a_taken_address_is_in_use_until_its_server_closes() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        first = await serve(network)
        with pytest.raises(AddressInUse, match=ADDRESS):
            await serve(network)
        await serve(network, "other:1000")
        await first.close()
        await serve(network)

    run_virtual(main())


def test_port_zero_takes_a_free_one() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        servers = [await serve(network, "server:0") for _ in range(3)]
        addresses = {server.address for server in servers}
        assert len(addresses) == 3
        assert all(a.startswith("server:") and not a.endswith(":0") for a in addresses)

    run_virtual(main())


def test_two_networks_do_not_see_each_other() -> None:
    async def main() -> None:
        await serve(MemoryNetwork())
        connection = await MemoryNetwork().transport().connect(ADDRESS)
        with pytest.raises(PeerUnreachable):
            await connection.call("Echo", b"", 1.0)

    run_virtual(main())


# --- streams -----------------------------------------------------------------------------------


def test_both_directions_keep_their_order_and_end_when_closed() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        await serve(network)
        stream = await open_stream(network)
        for number in range(3):
            await stream.send(bytes([number]))
        await stream.close()
        await stream.close()
        assert [await stream.receive() for _ in range(5)] == [b"\0", b"\1", b"\2", None, None]

    run_virtual(main())


def test_the_seventeenth_message_waits_for_the_receiver() -> None:
    async def slow(stream: Stream) -> None:
        await asyncio.sleep(100)
        await stream.receive()
        await asyncio.sleep(NEVER)

    async def main() -> None:
        network = MemoryNetwork()
        await serve(network, streams={"Slow": slow})
        stream = await open_stream(network, "Slow")
        for _ in range(16):
            await stream.send(b"x")
        assert await elapsed_s() == 0
        await stream.send(b"x")
        assert await elapsed_s() == pytest.approx(100)

    run_virtual(main())


def test_a_full_direction_does_not_hold_up_the_other() -> None:
    async def shout(stream: Stream) -> None:
        for _ in range(16):
            await stream.send(b"down")
        await echo(stream)

    async def main() -> None:
        network = MemoryNetwork()
        await serve(network, streams={"Shout": shout})
        stream = await open_stream(network, "Shout")
        for _ in range(16):
            await stream.send(b"up")
        await stream.close()
        received = []
        while (message := await stream.receive()) is not None:
            received.append(message)
        assert received == [b"down"] * 16 + [b"up"] * 16

    run_virtual(main())


def test_nothing_can_be_sent_after_ones_own_close() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        await serve(network)
        stream = await open_stream(network)
        await stream.close()
        with pytest.raises(StreamClosed):
            await stream.send(b"x")

    run_virtual(main())


def test_the_end_of_the_handler_is_the_end_of_the_stream_after_all_it_sent() -> None:
    async def short(stream: Stream) -> None:
        await stream.send(b"last")

    async def main() -> None:
        network = MemoryNetwork()
        await serve(network, streams={"Short": short})
        stream = await open_stream(network, "Short")
        assert [await stream.receive(), await stream.receive()] == [b"last", None]

    run_virtual(main())


@pytest.mark.parametrize("error", [BadFrame, PeerUnreachable, StreamClosed, InvariantBroken])
def test_an_error_of_ours_in_a_handler_breaks_the_stream_after_all_it_sent(
    error: type[AtollError],
) -> None:
    async def refuse(stream: Stream) -> None:
        await stream.send(b"before")
        await stream.receive()
        raise error("no")

    async def main() -> None:
        network = MemoryNetwork()
        await serve(network, streams={"Refuse": refuse})
        stream = await open_stream(network, "Refuse")
        await stream.send(b"x")
        assert await stream.receive() == b"before"
        for _ in range(2):
            with pytest.raises(StreamClosed):
                await stream.receive()
        with pytest.raises(StreamClosed):
            await stream.send(b"y")

    run_virtual(main())


@pytest.mark.parametrize("error", [None, BadFrame("no")])
def test_once_the_handler_has_returned_nobody_waits_for_room(error: BadFrame | None) -> None:
    async def short(_: Stream) -> None:
        await asyncio.sleep(10)
        if error is not None:
            raise error

    async def main() -> None:
        network = MemoryNetwork()
        await serve(network, streams={"Short": short})
        stream = await open_stream(network, "Short")
        for _ in range(16):
            await stream.send(b"x")
        with pytest.raises(StreamClosed):
            await stream.send(b"waits for room until the handler returns")
        assert await elapsed_s() == pytest.approx(10)
        with pytest.raises(StreamClosed):
            await stream.send(b"y")
        await stream.close()

    run_virtual(main())


def test_a_closing_server_breaks_its_streams_as_a_crash_does() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        server = await serve(network)
        stream = await open_stream(network)
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(1)
        await server.close()
        with pytest.raises(StreamClosed):
            await waiting
        with pytest.raises(StreamClosed):
            await stream.send(b"x")
        with pytest.raises(PeerUnreachable):
            await open_stream(network)

    run_virtual(main())


def test_a_closing_server_frees_a_sender_that_waits_for_room() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        server = await serve(network)
        stream = await open_stream(network, "Deaf")
        for _ in range(16):
            await stream.send(b"x")
        waiting = asyncio.create_task(stream.send(b"x"))
        await asyncio.sleep(1)
        await server.close()
        with pytest.raises(StreamClosed):
            await waiting

    run_virtual(main())


def test_streams_of_one_connection_are_independent() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        await serve(network)
        one, two = await open_stream(network), await open_stream(network)
        await one.send(b"1")
        await two.send(b"2")
        assert (await two.receive(), await one.receive()) == (b"2", b"1")
        await one.close()
        await two.send(b"3")
        assert await two.receive() == b"3"

    run_virtual(main())
