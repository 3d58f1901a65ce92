"""The agreed state: a round is staged beside it, becomes it by a swap, and is proved by its root."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load, save

from node.replica import Replica, tensors_of
from outer_optimizer.codec import codec_for
from outer_optimizer.encoding import BadEncoding
from outer_optimizer.finite import NonFinite
from outer_optimizer.optimizer import transform_for
from outer_optimizer.transform import FloatArray, Hyper
from protocol.errors import InvariantBroken
from protocol.layout import Layout, TensorLayout, build_layout
from protocol.merkle import leaf, root

TENSORS = (
    TensorLayout("small", (3,), "float32"),
    TensorLayout("large", (50, 100), "float32"),
    TensorLayout("head", (4_200,), "float32"),
    TensorLayout("scale", (), "float32"),
)
HYPER = Hyper(lr=0.5, momentum=0.5)


def make_layout(fragments: int = 2, tensors: tuple[TensorLayout, ...] = TENSORS) -> Layout:
    return build_layout(tensors, fragments, 4_096, 2)


@dataclass
class World:
    """A replica at the start state, and the update that brings any gradient to it."""

    layout: Layout
    replica: Replica

    def reduced(self, fragment: int, gradient: FloatArray) -> list[bytes]:
        codec = codec_for("fp32")
        cells = self.layout.fragments[fragment].cells
        return [codec.encode(gradient[c.start : c.start + c.values], c.lengths) for c in cells]

    def gradient(self, fragment: int, seed: int = 0) -> FloatArray:
        values = self.layout.fragments[fragment].values
        return np.random.default_rng(seed).standard_normal(values).astype(np.float32)

    def round(self, fragment: int, number: int, seed: int = 0) -> bytes:
        staged = self.replica.stage(
            fragment, self.reduced(fragment, self.gradient(fragment, seed)), HYPER
        )
        self.replica.swap(fragment, number)
        return staged


def make_world(optimizer: str = "nesterov", **changes: Any) -> World:
    layout = make_layout(**changes)
    replica = Replica(layout, transform_for(optimizer), codec_for("fp32"))
    for number, fragment in enumerate(layout.fragments):
        start = np.sin(np.arange(fragment.values, dtype=np.float32) + number)
        replica.load_anchor(number, 0, start)
    return World(layout, replica)


def roots(world: World) -> list[bytes]:
    return [world.replica.root(number) for number in range(len(world.layout.fragments))]


def anchors(world: World) -> list[FloatArray]:
    return [world.replica.anchor(n).copy() for n in range(len(world.layout.fragments))]


def equal(ours: list[FloatArray], theirs: list[FloatArray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


# --- stage and swap ----------------------------------------------------------------------------


def test_a_staged_round_leaves_the_agreed_state_untouched() -> None:
    world = make_world()
    before, proved = anchors(world), roots(world)
    staged = world.replica.stage(0, world.reduced(0, world.gradient(0)), HYPER)
    assert staged != proved[0]
    assert equal(anchors(world), before)
    assert roots(world) == proved
    assert world.replica.rounds == [0, 0]


def test_a_swap_makes_the_staged_round_the_agreed_one_in_its_fragment_alone() -> None:
    world = make_world()
    before, proved = anchors(world), roots(world)
    staged = world.round(1, 3)
    assert roots(world) == [proved[0], staged]
    assert world.replica.rounds == [0, 3]
    assert np.array_equal(world.replica.anchor(0), before[0])
    assert not np.array_equal(world.replica.anchor(1), before[1])


def test_a_round_follows_the_formula_with_the_momentum_of_the_rounds_before() -> None:
    world = make_world()
    anchor = world.replica.anchor(0).astype(np.float64)
    momentum = np.zeros_like(anchor)
    for number in (1, 2, 3):
        gradient = world.gradient(0, seed=number)
        momentum = 0.5 * momentum + gradient
        anchor = anchor - 0.5 * (gradient + 0.5 * momentum)
        world.round(0, number, seed=number)
        np.testing.assert_allclose(world.replica.anchor(0), anchor, atol=1e-5)


def test_a_round_staged_twice_is_the_last_one_staged() -> None:
    world, straight = make_world(), make_world()
    world.replica.stage(0, world.reduced(0, world.gradient(0, seed=8)), HYPER)
    assert world.round(0, 1, seed=9) == straight.round(0, 1, seed=9)
    assert equal(anchors(world), anchors(straight))
    assert world.round(0, 2, seed=1) == straight.round(0, 2, seed=1)


# --- the root ----------------------------------------------------------------------------------


def test_the_root_is_merkle_over_anchor_and_outer_state_cell_by_cell() -> None:
    world = make_world()
    staged = world.round(0, 1)
    anchor, momentum = world.replica.anchor(0), world.gradient(0)  # b = 0.5 * 0 + g
    leaves = []
    for cell in world.layout.fragments[0].cells:
        at = slice(cell.start, cell.start + cell.values)
        content = anchor[at].astype("<f4").tobytes() + momentum[at].astype("<f4").tobytes()
        leaves.append(leaf(blake3(content).digest()))
    assert len(leaves) > 1
    assert world.replica.root(0) == staged == root(leaves)


def test_any_value_of_anchor_or_state_changes_the_root() -> None:
    world = make_world()
    world.round(0, 1)
    found = {world.replica.root(0)}
    values = world.layout.fragments[0].values
    for place in (0, 4_095, 4_096, values - 1):
        world.replica.anchor(0)[place] += 1
        found.add(world.replica.root(0))
    assert len(found) == 5
    slower = make_world()
    gradient = world.gradient(0)
    slower.replica.stage(0, slower.reduced(0, gradient), Hyper(lr=0.5, momentum=0.25))
    slower.replica.swap(0, 1)
    assert slower.replica.root(0) not in found


def test_equal_updates_give_equal_roots_on_every_island() -> None:
    first, second = make_world(), make_world()
    for number in (1, 2):
        assert first.round(0, number, seed=number) == second.round(0, number, seed=number)
    assert roots(first) == roots(second)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 5_002])
def test_an_anchor_that_is_not_finite_is_refused_and_changes_nothing(place: int) -> None:
    world = make_world()
    before, proved = anchors(world), roots(world)
    gradient = np.zeros_like(world.gradient(0))
    gradient[place] = 3e38
    with (
        np.errstate(over="ignore"),
        pytest.raises(NonFinite, match="the new anchor: value .* is not finite"),
    ):
        world.replica.stage(0, world.reduced(0, gradient), Hyper(lr=2.0, momentum=0.5))
    assert equal(anchors(world), before)
    assert roots(world) == proved


@pytest.mark.parametrize("cell", [b"", bytes(4), np.float32("nan").tobytes()])
def test_a_cell_that_does_not_decode_is_refused_and_changes_nothing(cell: bytes) -> None:
    world = make_world()
    before, proved = anchors(world), roots(world)
    cells = world.reduced(0, world.gradient(0))
    bad = cell * (len(cells[-1]) // 4) if cell[2:] == b"\xc0\x7f" else cell
    with pytest.raises(BadEncoding):
        world.replica.stage(0, [*cells[:-1], bad], HYPER)
    assert equal(anchors(world), before)
    assert roots(world) == proved


def test_after_a_refused_round_the_next_one_is_as_if_it_had_never_been() -> None:
    world, straight = make_world(), make_world()
    cells = world.reduced(0, world.gradient(0))
    with pytest.raises(BadEncoding):
        world.replica.stage(0, [*cells[:-1], b""], HYPER)
    assert world.round(0, 1, seed=1) == straight.round(0, 1, seed=1)


@pytest.mark.parametrize("change", [-1, 1])
def test_another_number_of_cells_than_the_layouts_is_an_error(change: int) -> None:
    world = make_world()
    cells = world.reduced(0, world.gradient(0))
    wrong = cells[:change] if change < 0 else [*cells, cells[-1]]
    with pytest.raises(ValueError, match="zip"):
        world.replica.stage(0, wrong, HYPER)


# --- disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["average", "sgd", "nesterov", "adam", "yogi"])
def test_what_is_saved_comes_back_and_goes_on_with_the_same_bits(
    tmp_path: Path, optimizer: str
) -> None:
    world, again = make_world(optimizer), make_world(optimizer)
    world.round(0, 1, seed=1)
    world.round(1, 2, seed=2)
    world.replica.save(tmp_path / "snapshot")
    again.replica.restore(tmp_path / "snapshot")
    assert again.replica.rounds == [1, 2]
    assert roots(again) == roots(world)
    assert equal(anchors(again), anchors(world))
    assert again.round(0, 3, seed=3) == world.round(0, 3, seed=3)


def test_a_staged_round_is_not_part_of_a_snapshot(tmp_path: Path) -> None:
    world, again = make_world(), make_world()
    proved = roots(world)
    world.replica.stage(0, world.reduced(0, world.gradient(0)), HYPER)
    world.replica.save(tmp_path / "snapshot")
    again.replica.restore(tmp_path / "snapshot")
    assert roots(again) == proved


@pytest.mark.parametrize(
    "tensors",
    [
        (*TENSORS[:2], TensorLayout("head", (4_201,), "float32"), TENSORS[3]),
        (TensorLayout("small", (4,), "float32"), *TENSORS[1:]),
    ],
)
def test_a_snapshot_of_another_layout_is_refused_with_the_file_and_the_remedy(
    tmp_path: Path, tensors: tuple[TensorLayout, ...]
) -> None:
    path = tmp_path / "snapshot"
    make_world(tensors=tensors).replica.save(path)
    refused(path, r"an array of \(.*,\) float32 in place of \(.*,\) float32")


def refused(path: Path, why: str) -> None:
    told = (
        f"{re.escape(str(path))}: not a snapshot of this run \\({why}\\): remove it to start from"
    )
    world = make_world()
    with pytest.raises(InvariantBroken, match=f"^{told} the run's own$"):
        world.replica.restore(path)
    assert world.replica.rounds == [0, 0]


@pytest.mark.parametrize("optimizer", ["average", "sgd", "adam", "yogi"])
def test_a_snapshot_of_another_optimizer_is_refused(tmp_path: Path, optimizer: str) -> None:
    make_world(optimizer).replica.save(tmp_path / "snapshot")
    refused(tmp_path / "snapshot", "it holds other arrays")


def test_a_snapshot_of_another_number_of_fragments_is_refused(tmp_path: Path) -> None:
    make_world(fragments=1).replica.save(tmp_path / "snapshot")
    refused(tmp_path / "snapshot", "it holds other arrays")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:7],
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\xff" * len(data),
        lambda data: bytes(len(data)),
    ],
    ids=["empty", "7 bytes", "half a header", "cut", "longer", "ones", "zeros"],
)
def test_a_file_that_is_no_whole_snapshot_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "snapshot"
    make_world().replica.save(path)
    path.write_bytes(damage(path.read_bytes()))
    refused(path, ".*")


@pytest.mark.parametrize("rounds", [None, "", "0", "0,0,0", "0,x", "9" * 5_000 + ",0"])
def test_a_snapshot_without_a_round_for_each_fragment_is_refused(
    tmp_path: Path, rounds: str | None
) -> None:
    path = tmp_path / "snapshot"
    make_world().replica.save(path)
    tensors = load(path.read_bytes())
    path.write_bytes(save(tensors, None if rounds is None else {"rounds": rounds}))
    refused(path, ".*")


def test_a_snapshot_of_another_precision_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    make_world().replica.save(path)
    tensors = {name: a.astype(np.float64) for name, a in load(path.read_bytes()).items()}
    path.write_bytes(save(tensors, {"rounds": "0,0"}))
    refused(path, r"an array of \(5003,\) float64 in place of \(5003,\) float32")


# --- parameters --------------------------------------------------------------------------------


def test_the_anchor_is_seen_as_parameters_in_their_own_shapes() -> None:
    world = make_world()
    tensors = world.replica.named_tensors()
    assert {name: values.shape for name, values in tensors.items()} == {
        tensor.name: tensor.shape for tensor in TENSORS
    }
    seen = np.sort(np.concatenate([values.ravel() for values in tensors.values()]))
    assert np.array_equal(seen, np.sort(np.concatenate(anchors(world))))


def test_tensors_of_a_fragment_are_views_of_its_flat_vector() -> None:
    fragment = make_layout(fragments=1).fragments[0]
    flat = np.zeros(fragment.values, np.float32)
    for number, values in enumerate(tensors_of(fragment, flat).values()):
        values[...] = number + 1
    assert sorted(np.unique(flat)) == [1, 2, 3, 4]
    assert [int((flat == n + 1).sum()) for n in range(4)] == [t.values for t in TENSORS]
