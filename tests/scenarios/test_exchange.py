"""The two-stage all-reduce alone, over a memory network: exact sums, bounded messages and memory, broken
links, and sizes far beyond one message."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from node.cell_chunks import CHUNK_BYTES, chunks, cut_cells
from node.contribution import Contribution, make_contribution
from node.exchange import Exchange, Hooks, Wiring
from node.peer_links import PeerLinks
from outer_optimizer.aggregate import weighted_mean
from outer_optimizer.codec import Codec, codec_for
from protocol.errors import BadFrame, StreamClosed
from protocol.frames import MAX_CHUNK_BYTES, Frame, FrameKind, decode_frame, encode_frame
from protocol.identity import Identity
from protocol.layout import Fragment, TensorLayout, build_layout
from protocol.memory_transport import MemoryNetwork
from protocol.messages import Ballot, IslandId, Part, Participant, Plan, SlotKind, Term
from protocol.partition import assign_parts
from protocol.transport import Stream
from protocol.virtual_time import run_virtual
from protocol.wire import encode_plan, plan_id

HEADER_BYTES = 48


def fragment_of(*shapes: tuple[int, ...], cell_values: int | None = None) -> Fragment:
    tensors = [TensorLayout(f"t{i}", shape, "float32") for i, shape in enumerate(shapes)]
    return build_layout(tensors, 1, cell_values, 3).fragments[0]


@dataclass
class Side:
    """One island of an exchange."""

    name: str
    local: np.ndarray
    contribution: Contribution
    identity: Identity
    held: set[Part] = field(default_factory=set)
    exchange: Exchange | None = None
    links: PeerLinks | None = None
    received_bytes: int = 0
    largest: int = 0


class World:
    """Three islands that all start the same plan."""

    def __init__(self, fragment: Fragment, codec: Codec, names: str = "abc") -> None:
        self.fragment, self.codec = fragment, codec
        self.network = MemoryNetwork()
        self.anchor = np.zeros(fragment.values, np.float32)
        self.sides = [self._side(number, name) for number, name in enumerate(names)]
        self.sides.sort(key=lambda side: side.identity.island)
        participants = tuple(
            Participant(s.identity.island, s.contribution.root, w, 10, 1)
            for s, w in zip(self.sides, (0.5, 0.25, 0.25), strict=False)
        )
        sizes = [cell.values for cell in fragment.cells]
        parts = assign_parts(sizes, {p.island: 1.0 for p in participants})
        self.plan = Plan(
            "run", Ballot(Term(1, b""), 1), 1, SlotKind.COMMIT, 0, 0, b"b" * 32, 0,
            participants, parts, b"", 60.0,
        )  # fmt: skip
        self.plan_id = plan_id(encode_plan(self.plan))

    def _side(self, number: int, name: str) -> Side:
        values = np.arange(self.fragment.values, dtype=np.float32)
        local = np.sin(values * np.float32(0.01) + number).astype(np.float32)
        contribution = make_contribution(0, self.fragment, self.codec, self.anchor, local, (10, 1))
        return Side(name, local, contribution, Identity(name.encode() * 32))

    async def start(self) -> None:
        addresses: dict[IslandId, str] = {}
        for side in self.sides:
            transport = self.network.transport()
            side.links = PeerLinks(transport, "run", side.identity.island, self._receiver(side))
            server = await transport.serve(
                f"{side.name}:0", {}, {"Peer/Exchange": side.links.serve}
            )
            addresses[side.identity.island] = server.address
        for side in self.sides:
            assert side.links is not None
            wiring = Wiring(side.identity, side.links, self.codec, inline)
            hooks = Hooks(part_held=side.held.add, part_summed=lambda signed: None)
            members = frozenset(addresses)
            side.exchange = Exchange(
                self.plan, self.plan_id, self.fragment, side.contribution, members, wiring, hooks
            )
            side.links.set_peers(addresses)
            side.links.begin()
        for side in self.sides:
            assert side.exchange is not None
            side.exchange.start()

    def _receiver(self, side: Side) -> Callable[[IslandId, Frame], None]:
        def receive(peer: IslandId, frame: Frame) -> None:
            size = len(frame.payload) + HEADER_BYTES
            side.received_bytes += size
            side.largest = max(side.largest, size)
            assert side.exchange is not None
            side.exchange.receive(peer, frame)

        return receive

    async def finished(self) -> None:
        async with asyncio.timeout(600):
            while any(len(side.held) < len(self.plan.parts) for side in self.sides):
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for side in self.sides:
            if side.exchange is not None:
                await side.exchange.stop()
            if side.links is not None:
                await side.links.close()

    def reference(self) -> list[bytes]:
        """The sum, made in one place."""
        cells = []
        for number, cell in enumerate(self.fragment.cells):
            decoded = []
            for side in self.sides:
                out = np.empty(cell.values, np.float32)
                self.codec.decode(side.contribution.cells[number], cell.lengths, out)
                decoded.append(out)
            total = np.empty(cell.values, np.float32)
            weights = [np.float32(p.weight) for p in self.plan.participants]
            weighted_mean(decoded, weights, total)
            cells.append(self.codec.encode(total, cell.lengths))
        return cells


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def exchange(world: World, disturb: Callable[[World], Any] | None = None) -> None:
    async def main() -> None:
        await world.start()
        try:
            if disturb is not None:
                await disturb(world)
            await world.finished()
        finally:
            await world.close()

    run_virtual(main())


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_every_island_holds_exactly_the_reference_sum(codec: str) -> None:
    world = World(fragment_of((70, 900), (900,), (), cell_values=4_096), codec_for(codec))
    exchange(world)
    expected = world.reference()
    assert all(
        side.exchange is not None and side.exchange.cells() == expected for side in world.sides
    )


def test_a_large_tensor_among_many_tiny_ones_travels_in_bounded_messages() -> None:
    tiny = [(n % 7,) for n in range(3_000)]
    world = World(fragment_of((3_000, 1_000), *tiny), codec_for("fp32"))
    exchange(world)
    assert world.fragment.values * 4 > 11 << 20
    assert max(side.largest for side in world.sides) <= MAX_CHUNK_BYTES + HEADER_BYTES


def test_each_contribution_and_each_sum_crosses_each_link_once() -> None:
    world = World(fragment_of((300, 1_000), cell_values=4_096), codec_for("fp32"))
    exchange(world)
    payload = world.fragment.values * 4
    # a third of two contributions in, two thirds of the sum in, and a little for leaves and roots
    for side in world.sides:
        assert payload * 4 / 3 * 0.97 <= side.received_bytes <= payload * 4 / 3 * 1.05


def test_an_owner_holds_a_window_per_peer_never_a_whole_contribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("node.cell_chunks.CHUNK_BYTES", 16 << 10)
    monkeypatch.setattr("node.part_sum.WINDOW_BYTES", 64 << 10)
    world = World(fragment_of((500, 1_000), cell_values=4_096), codec_for("fp32"))
    most = 0

    async def watch(world: World) -> None:
        nonlocal most
        while any(len(side.held) < len(world.plan.parts) for side in world.sides):
            await asyncio.sleep(0)
            for side in world.sides:
                assert side.exchange is not None
                assert side.exchange.sum is not None
                for sender in side.exchange.sum.senders:
                    most = max(most, side.exchange.sum.held_bytes(sender))

    exchange(world, watch)
    assert 0 < most <= 64 << 10


def test_links_that_break_in_mid_exchange_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.cell_chunks.CHUNK_BYTES", 16 << 10)

    async def cut(world: World) -> None:
        for _ in range(5):
            await asyncio.sleep(0.005)
            for side in world.sides:
                assert side.links is not None
                for link in list(side.links._links.values()):
                    await link.close()

    world = World(fragment_of((300, 1_000), cell_values=4_096), codec_for("int8"))
    exchange(world, cut)
    expected = world.reference()
    assert all(
        side.exchange is not None and side.exchange.cells() == expected for side in world.sides
    )


def test_a_changed_byte_in_a_contribution_never_reaches_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The damaged link is dropped; on the next one the true cells arrive."""
    damaged = 0

    def damage(data: bytes) -> Frame:
        nonlocal damaged
        frame = decode_frame(data)
        if frame.kind is FrameKind.CELLS and not damaged:
            damaged += 1
            return frame._replace(payload=bytes(frame.payload[:-1]) + b"\x55")
        return frame

    monkeypatch.setattr("node.peer_links.decode_frame", damage)
    world = World(fragment_of((30, 1_000), cell_values=4_096), codec_for("int8"))
    exchange(world)
    assert damaged == 1
    expected = world.reference()
    assert all(
        side.exchange is not None and side.exchange.cells() == expected for side in world.sides
    )


@pytest.mark.parametrize(
    ("kind", "cells", "payload", "said"),
    [
        (FrameKind.CELLS, (0, 1), b"x" * 16_384, "nobody asked for"),
        (FrameKind.LEAVES, (0, 1), b"x" * 40, "not ours"),
        (FrameKind.REDUCED, (0, 1), b"x", "does not own"),
        (FrameKind.STATE, (0, 1), b"", "does not belong to a plan"),
        (FrameKind.CREDIT, (5, 99), b"", "does not own"),
    ],
)
def test_frames_that_do_not_fit_the_plan_are_refused(
    kind: FrameKind, cells: tuple[int, int], payload: bytes, said: str
) -> None:
    async def main() -> None:
        world = World(fragment_of((30, 1_000), cell_values=4_096), codec_for("fp32"))
        await world.start()
        side = world.sides[0]
        stranger = Identity(b"s" * 32).island
        frame = Frame(kind, world.plan_id, *cells, payload)
        try:
            assert side.exchange is not None
            with pytest.raises(BadFrame, match=said):
                side.exchange.receive(stranger, frame)
        finally:
            await world.close()

    run_virtual(main())


def test_chunks_of_any_size_are_understood_by_any_receiver() -> None:
    """The chunk size is the sender's business: the receiver cuts by its own layout."""
    sizes = [700, 30, 512, 4_000, 1]
    cells = [bytes([n]) * size for n, size in enumerate(sizes)]
    for first, count in [(0, 5), (0, 1), (1, 3), (4, 1)]:
        payload = b"".join(cells[first : first + count])
        frame = decode_frame(
            encode_frame(FrameKind.REDUCED, payload, first_cell=first, cells=count)
        )
        assert [bytes(data) for _, data in cut_cells(frame, sizes)] == cells[first : first + count]
    runs = list(chunks([CHUNK_BYTES // 2, CHUNK_BYTES // 2, CHUNK_BYTES, 3 * CHUNK_BYTES, 1], 0, 5))
    assert runs == [(0, 2), (2, 1), (3, 1), (4, 1)]


def test_a_chunk_whose_size_is_not_that_of_its_cells_is_refused() -> None:
    frame = decode_frame(encode_frame(FrameKind.REDUCED, b"12345", first_cell=0, cells=1))
    with pytest.raises(BadFrame, match="do not have 5 bytes"):
        cut_cells(frame, [4])
    with pytest.raises(BadFrame):
        cut_cells(frame._replace(first_cell=9), [4])


def test_a_state_is_served_and_fetched_without_a_second_copy(tmp_path: Any) -> None:
    """Extra memory of a transfer is a few chunks, whatever the state's size."""
    from safetensors.numpy import save_file

    from node.replica import Replica
    from node.start_donor import StartDonor, fetch_start
    from outer_optimizer.optimizer import transform_for
    from protocol.messages import Start

    tensors = (TensorLayout("w", (6_000, 1_000), "float32"),)
    save_file({"w": np.ones((6_000, 1_000), np.float32)}, tmp_path / "start.safetensors")
    layout = build_layout(tensors, 1, None, 1)
    replica = Replica(layout, transform_for("sgd"), codec_for("fp32"))
    replica.load_anchor(0, 0, np.ones(6_000_000, np.float32))
    start = Start("run", b"d" * 32, tensors, (replica.root(0),), b"")
    fresh = Replica(layout, transform_for("sgd"), codec_for("fp32"))
    donor = StartDonor(start, layout, tmp_path / "start.safetensors")

    async def main() -> int:
        network = MemoryNetwork()
        server = await network.transport().serve("donor:0", {}, donor.streams)
        tracemalloc.start()
        await fetch_start(network.transport(), [server.address], start, layout, fresh)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await server.close()
        return peak

    assert run_virtual(main()) < 24 << 20
    assert fresh.root(0) == start.fragment_roots[0]


def test_a_transfer_goes_on_at_the_next_donor_where_the_last_one_broke_off(tmp_path: Any) -> None:
    from safetensors.numpy import save_file

    from node.replica import Replica
    from node.start_donor import StartDonor, fetch_start
    from outer_optimizer.optimizer import transform_for
    from protocol.messages import Start

    tensors = (TensorLayout("w", (500, 1_000), "float32"),)
    save_file({"w": np.ones((500, 1_000), np.float32)}, tmp_path / "start.safetensors")
    layout = build_layout(tensors, 1, 4_096, 1)
    replica = Replica(layout, transform_for("sgd"), codec_for("fp32"))
    replica.load_anchor(0, 0, np.ones(500_000, np.float32))
    start = Start("run", b"d" * 32, tensors, (replica.root(0),), b"")
    fresh = Replica(layout, transform_for("sgd"), codec_for("fp32"))
    donor = StartDonor(start, layout, tmp_path / "start.safetensors")

    async def main() -> None:
        network = MemoryNetwork()

        async def tired(stream: Stream) -> None:
            """Sends three chunks, then breaks off."""
            await stream.receive()
            for first, count in list(chunks([16_384] * 122 + [2_048 * 4], 0, 123))[:3]:
                payload = np.ones(count * 4_096, np.float32).tobytes()
                await stream.send(
                    encode_frame(FrameKind.STATE, payload, first_cell=first, cells=count)
                )
            raise StreamClosed("tired")

        first = await network.transport().serve("tired:0", {}, {"Peer/State": tired})
        second = await network.transport().serve("good:0", {}, donor.streams)
        donors = [first.address, second.address]
        await fetch_start(network.transport(), donors, start, layout, fresh)

    run_virtual(main())
    assert fresh.root(0) == start.fragment_roots[0]
