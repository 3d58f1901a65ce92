"""The model's size has no bearing on what a call can carry: nothing to set, on either side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from coordinator.coordinator import Coordinator
from coordinator.service import Service
from node.coordinator_client import CoordinatorClient, registration_of
from protocol import atoll_coordinator_pb2 as pb
from protocol.grpc_transport import GrpcTransport
from protocol.identity import Identity
from protocol.layout import TensorLayout
from protocol.messages import NO_TERM, Ready, Start
from protocol.run_files import Run
from protocol.spec import parse_spec, spec_from_json
from protocol.wire import decode_record, encode_ready, encode_start, signed_to_pb

TENSORS = 60_000
ME = Identity(b"i" * 32)
Story = Callable[[CoordinatorClient, Coordinator], Awaitable[None]]


def large_run(islands: int) -> Run:
    """A run whose layout alone takes more than 5 MB."""
    spec = parse_spec(
        {
            "name": "large",
            "target_tokens": 10,
            "data": {"text": ["unused"]},
            "sync": {"expected_islands": islands},
        },
        "test",
    )
    layout = tuple(
        TensorLayout(f"{'block.' * 12}{number}.weight", (1,), "float32")
        for number in range(TENSORS)
    )
    start = Start("large-1", spec.digest(), layout, (b"r" * 32,), b"")
    owner = Identity(b"o" * 32)
    return Run(spec, owner, owner.sign("start", encode_start(start)), start, b"")


def with_coordinator(folder: Path, islands: int, story: Story) -> None:
    async def main() -> None:
        coordinator = Coordinator(large_run(islands), folder, time.monotonic)
        transport = GrpcTransport()
        server = await Service(coordinator, 1.0).serve(transport, "127.0.0.1:0")
        client = await CoordinatorClient.connect(transport, server.address, ME)
        try:
            await story(client, coordinator)
        finally:
            await client.close()
            await server.close()
            coordinator.close()

    asyncio.run(main())


async def register(client: CoordinatorClient, coordinator: Coordinator, name: str) -> None:
    spec = spec_from_json(coordinator.describe().spec_json.encode(), "test")
    registration = registration_of("large-1", name, [], spec.digest(), -1)
    term = await client.register(registration, NO_TERM)
    assert term is not None
    assert await client.register(registration, term) is None


def test_more_than_5_mb_pass_through_every_call_and_the_watch_stream(tmp_path: Path) -> None:
    async def story(client: CoordinatorClient, coordinator: Coordinator) -> None:
        described = await client.describe()
        assert described.ByteSize() > 5_000_000
        await register(client, coordinator, "a")
        async for event in client.watch("large-1", 0):
            if event.HasField("record"):
                assert decode_record(event.record.record).slot == 0
                assert event.ByteSize() > 5_000_000
                break
        norms = tuple(float(n) for n in range(700_000))
        ready = Ready("large-1", 1, 0, b"r" * 32, 0, b"c" * 32, 10, 1, 0.0, norms)
        payload = encode_ready(ready)
        assert len(payload) > 5_000_000
        post = pb.PostRequest(ready=signed_to_pb(ME.sign("ready", payload)))
        assert await client.post(post) == ""

    with_coordinator(tmp_path, 1, story)


def test_a_hundred_nodes_may_report_at_once(tmp_path: Path) -> None:
    """Each report is a message of its own: no shared budget shrinks with their number."""

    async def story(client: CoordinatorClient, coordinator: Coordinator) -> None:
        await register(client, coordinator, "a")
        progress = pb.Progress(run_id="large-1", phase="x" * 50_000)
        signed = ME.sign("progress", progress.SerializeToString())
        answers = await asyncio.gather(
            *(client.post(pb.PostRequest(progress=signed_to_pb(signed))) for _ in range(100))
        )
        assert answers == [""] * 100

    with_coordinator(tmp_path, 2, story)
