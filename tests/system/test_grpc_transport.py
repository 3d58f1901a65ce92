"""The real transport on loopback: the contract that the memory transport keeps, with real sockets."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing

import pytest

from protocol.errors import (
    AddressInUse,
    AtollError,
    BadFrame,
    ConfigError,
    PeerUnreachable,
    StreamClosed,
    TransportError,
)
from protocol.frames import MAX_MESSAGE_BYTES
from protocol.grpc_transport import GrpcTransport, host_of
from protocol.transport import CallHandler, Connection, Server, Stream, StreamHandler

LARGE = bytes(5_000_000)  # more than gRPC takes by default
Story = Callable[[Server, Connection], Awaitable[None]]


async def echo_call(request: bytes) -> bytes:
    return request


async def echo(stream: Stream) -> None:
    while (message := await stream.receive()) is not None:
        await stream.send(message)


def play(
    story: Story,
    calls: Mapping[str, CallHandler] | None = None,
    streams: Mapping[str, StreamHandler] | None = None,
) -> None:
    """Runs `story` with a server on a free port and a connection to it, and closes both."""

    async def main() -> None:
        transport = GrpcTransport()
        server = await transport.serve(
            "127.0.0.1:0", calls or {"Test/Echo": echo_call}, streams or {"Test/Stream": echo}
        )
        connection = await transport.connect(server.address)
        try:
            async with asyncio.timeout(30):
                await story(server, connection)
        finally:
            await connection.close()
            await server.close()

    asyncio.run(main())


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- calls -------------------------------------------------------------------------------------


def test_a_call_is_answered_also_when_it_is_empty() -> None:
    async def story(_: Server, connection: Connection) -> None:
        assert await connection.call("Test/Echo", b"hello", 10.0) == b"hello"
        assert await connection.call("Test/Echo", b"", 10.0) == b""

    play(story)


def test_five_megabytes_pass_both_ways_in_calls_and_streams() -> None:
    async def story(_: Server, connection: Connection) -> None:
        assert await connection.call("Test/Echo", LARGE, 20.0) == LARGE
        stream = await connection.stream("Test/Stream")
        await stream.send(LARGE)
        assert await stream.receive() == LARGE
        await stream.close()

    play(story)


def test_a_message_above_the_limit_is_a_transport_error_and_the_connection_lives_on() -> None:
    async def story(_: Server, connection: Connection) -> None:
        with pytest.raises(TransportError):
            await connection.call("Test/Echo", bytes(MAX_MESSAGE_BYTES + 1), 20.0)
        assert await connection.call("Test/Echo", b"x", 10.0) == b"x"

    play(story)


def test_many_calls_at_once_get_their_own_answers() -> None:
    async def story(_: Server, connection: Connection) -> None:
        requests = [b"%d" % n for n in range(50)]
        answers = await asyncio.gather(*(connection.call("Test/Echo", r, 10.0) for r in requests))
        assert answers == requests

    play(story)


def test_a_bad_frame_raised_by_a_handler_arrives_with_its_text() -> None:
    async def refuse(_: bytes) -> bytes:
        raise BadFrame("ready.root: a digest has 32 bytes, not 3")

    async def story(server: Server, connection: Connection) -> None:
        with pytest.raises(BadFrame, match="a digest has 32 bytes, not 3") as caught:
            await connection.call("Test/Refuse", b"", 10.0)
        assert server.address in str(caught.value)

    play(story, calls={"Test/Refuse": refuse})


def test_an_unknown_method_is_an_error_of_ours_at_once() -> None:
    async def story(_: Server, connection: Connection) -> None:
        with pytest.raises(AtollError):
            await connection.call("Test/Nothing", b"", 10.0)
        stream = await connection.stream("Test/Nothing")
        with pytest.raises(AtollError):
            await stream.receive()

    play(story)


def test_a_handler_that_does_not_answer_is_given_up_at_the_timeout() -> None:
    async def silent(_: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def story(server: Server, connection: Connection) -> None:
        with pytest.raises(PeerUnreachable, match=server.address):
            await connection.call("Test/Silent", b"", 0.2)

    play(story, calls={"Test/Silent": silent})


def test_a_call_on_a_closed_connection_finds_nobody() -> None:
    async def story(server: Server, connection: Connection) -> None:
        assert await connection.call("Test/Echo", b"x", 10.0) == b"x"
        await connection.close()
        with pytest.raises(PeerUnreachable, match=server.address):
            await connection.call("Test/Echo", b"x", 10.0)

    play(story)


def test_a_call_that_waits_while_its_connection_is_closed_ends_with_stream_closed() -> None:
    async def silent(_: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def story(_: Server, connection: Connection) -> None:
        calling = asyncio.create_task(connection.call("Test/Silent", b"", 20.0))
        await asyncio.wait({calling}, timeout=0.2)
        assert not calling.done()
        await connection.close()
        with pytest.raises(StreamClosed):
            await calling

    play(story, calls={"Test/Silent": silent})


def test_a_stream_of_a_closed_connection_finds_nobody() -> None:
    async def story(server: Server, connection: Connection) -> None:
        await connection.close()
        with pytest.raises(PeerUnreachable, match=server.address):
            await connection.stream("Test/Stream")

    play(story)


def test_a_cancelled_call_is_cancelled_and_no_error_of_the_network() -> None:
    async def silent(_: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def story(_: Server, connection: Connection) -> None:
        calling = asyncio.create_task(connection.call("Test/Silent", b"", 20.0))
        await asyncio.wait({calling}, timeout=0.1)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    play(story, calls={"Test/Silent": silent})


# --- addresses ---------------------------------------------------------------------------------


def test_nobody_there_is_unreachable_within_the_timeout() -> None:
    async def main() -> None:
        address = f"127.0.0.1:{free_port()}"
        connection = await GrpcTransport().connect(address)
        began = time.monotonic()
        with pytest.raises(PeerUnreachable, match=f"{address}: nobody answers"):
            await connection.call("Test/Echo", b"x", 0.5)
        assert time.monotonic() - began < 10
        stream = await connection.stream("Test/Stream")
        with pytest.raises((PeerUnreachable, StreamClosed)):
            await stream.receive()
        await connection.close()

    asyncio.run(main())


def test_a_taken_port_is_in_use_and_names_the_address() -> None:
    async def story(server: Server, _: Connection) -> None:
        with pytest.raises(AddressInUse, match=server.address):
            await GrpcTransport().serve(server.address, {}, {})

    play(story)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.0.0.1:",
        ":7447",
        "7447",
        "127.0.0.1:65536",
        "127.0.0.1:000080",
        "127.0.0.1:" + "9" * 5_000,
        "127.0.0.1:-1",
        "host:http",
        "",
    ],
)
def test_an_address_without_host_or_port_is_a_config_error_that_names_it(address: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="an address is host:port, with a port of 0 to 65535"):
            await GrpcTransport().serve(address, {}, {})
        with pytest.raises(ConfigError, match="an address is host:port, with a port of 0 to 65535"):
            await GrpcTransport().connect(address)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("address", "host"),
    [("127.0.0.1:0", "127.0.0.1"), ("a.example:65535", "a.example"), ("[::1]:7447", "[::1]")],
)
def test_the_host_of_an_address_is_all_before_its_last_colon(address: str, host: str) -> None:
    assert host_of(address) == host


def test_a_port_is_free_again_after_close() -> None:
    async def story(server: Server, connection: Connection) -> None:
        await server.close()
        again = await GrpcTransport().serve(server.address, {"Test/Echo": echo_call}, {})
        try:
            assert await connection.call("Test/Echo", b"back", 20.0) == b"back"
        finally:
            await again.close()

    play(story)


def test_a_call_waits_for_a_server_that_comes_within_the_timeout() -> None:
    async def main() -> None:
        address = f"127.0.0.1:{free_port()}"
        connection = await GrpcTransport().connect(address)
        calling = asyncio.create_task(connection.call("Test/Echo", b"early", 20.0))
        await asyncio.sleep(0)
        server = await GrpcTransport().serve(address, {"Test/Echo": echo_call}, {})
        assert await calling == b"early"
        await connection.close()
        await server.close()

    asyncio.run(main())


# --- streams -----------------------------------------------------------------------------------


def test_a_stream_carries_both_directions_in_order() -> None:
    async def story(_: Server, connection: Connection) -> None:
        stream = await connection.stream("Test/Stream")
        messages = [bytes([n]) * 1_000 for n in range(100)]

        async def send_all() -> None:
            for message in messages:
                await stream.send(message)

        sending = asyncio.create_task(send_all())
        assert [await stream.receive() for _ in messages] == messages
        await sending
        await stream.close()
        await stream.close()

    play(story)


def test_the_end_of_the_handler_is_the_end_of_the_stream_after_all_it_sent() -> None:
    async def count(stream: Stream) -> None:
        first = await stream.receive()
        assert first is not None
        for number in range(first[0]):
            await stream.send(bytes([number]))

    async def story(_: Server, connection: Connection) -> None:
        stream = await connection.stream("Test/Count")
        await stream.send(b"\3")
        assert [await stream.receive() for _ in range(4)] == [b"\0", b"\1", b"\2", None]
        await stream.close()

    play(story, streams={"Test/Count": count})


def test_a_bad_frame_raised_in_a_stream_ends_it_with_its_text() -> None:
    async def refuse(stream: Stream) -> None:
        await stream.receive()
        raise BadFrame("this is run a, not b")

    async def story(_: Server, connection: Connection) -> None:
        stream = await connection.stream("Test/Refuse")
        await stream.send(b"hello")
        with pytest.raises(TransportError, match="this is run a, not b"):
            await stream.receive()

    play(story, streams={"Test/Refuse": refuse})


def test_a_closing_server_breaks_its_streams() -> None:
    async def story(server: Server, connection: Connection) -> None:
        stream = await connection.stream("Test/Stream")
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        await server.close()
        with pytest.raises((StreamClosed, PeerUnreachable)):
            await waiting
        with pytest.raises((StreamClosed, PeerUnreachable)):
            await stream.send(b"x")

    play(story)


def test_a_receive_that_waits_while_its_stream_is_closed_ends_with_stream_closed() -> None:
    async def story(_: Server, connection: Connection) -> None:
        stream = await connection.stream("Test/Stream")
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        waiting = asyncio.create_task(stream.receive())
        await asyncio.wait({waiting}, timeout=0.1)
        await stream.close()
        with pytest.raises(StreamClosed):
            await waiting
        with pytest.raises(StreamClosed):
            await stream.receive()
        with pytest.raises(StreamClosed):
            await stream.send(b"y")

    play(story)


def test_a_send_that_waits_while_its_stream_is_closed_ends_with_stream_closed() -> None:
    async def deaf(_: Stream) -> None:
        await asyncio.Event().wait()

    async def story(_: Server, connection: Connection) -> None:
        stream = await connection.stream("Test/Deaf")

        async def send_on() -> None:
            while True:
                await stream.send(bytes(1 << 20))

        sending = asyncio.create_task(send_on())
        await asyncio.wait({sending}, timeout=0.5)
        assert not sending.done()
        await stream.close()
        with pytest.raises(StreamClosed):
            await sending

    play(story, streams={"Test/Deaf": deaf})


def test_a_stream_that_waits_while_its_connection_is_closed_ends_with_stream_closed() -> None:
    async def story(_: Server, connection: Connection) -> None:
        stream = await connection.stream("Test/Stream")
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        waiting = asyncio.create_task(stream.receive())
        await asyncio.wait({waiting}, timeout=0.1)
        await connection.close()
        with pytest.raises(StreamClosed):
            await waiting

    play(story)


@pytest.mark.parametrize("closed_first", [True, False])
def test_a_cancelled_task_is_cancelled_also_when_it_waits_on_a_stream(closed_first: bool) -> None:
    async def story(_: Server, connection: Connection) -> None:
        stream = await connection.stream("Test/Stream")
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        waiting = asyncio.create_task(stream.receive())
        await asyncio.wait({waiting}, timeout=0.1)
        if closed_first:
            await stream.close()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    play(story)


def test_two_streams_of_one_connection_are_independent() -> None:
    async def story(_: Server, connection: Connection) -> None:
        one = await connection.stream("Test/Stream")
        two = await connection.stream("Test/Stream")
        await one.send(b"1")
        await two.send(b"2")
        assert (await two.receive(), await one.receive()) == (b"2", b"1")
        await one.close()
        await two.send(b"3")
        assert await two.receive() == b"3"
        await two.close()

    play(story)


def test_a_receiver_that_does_not_read_holds_up_its_sender() -> None:
    """Nothing piles up without bound: far less than everything is taken before the first read."""
    chunk, chunks = bytes(1 << 20), 64
    go_on = asyncio.Event()

    async def late(stream: Stream) -> None:
        await go_on.wait()
        for _ in range(chunks):
            assert await stream.receive() == chunk
        await stream.send(b"all")

    async def story(_: Server, connection: Connection) -> None:
        stream = await connection.stream("Test/Late")
        sent = 0

        async def send_all() -> None:
            nonlocal sent
            for _ in range(chunks):
                await stream.send(chunk)
                sent += 1

        sending = asyncio.create_task(send_all())
        await asyncio.wait({sending}, timeout=0.5)
        assert not sending.done()
        assert sent < chunks // 2
        go_on.set()
        assert await stream.receive() == b"all"
        await sending

    play(story, streams={"Test/Late": late})
