"""Who writes which piece: random cuts of random tensors, dealt out to random ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from node.tiling import Box, Shape, whole, writers
from protocol.errors import ConfigError


@dataclass(frozen=True)
class Cut:
    """A tensor in boxes that tile it, and what each rank holds of it; None = no piece at all."""

    shape: Shape
    boxes: tuple[Box, ...]
    ranks: tuple[Box | None, ...]

    @property
    def held(self) -> list[dict[str, Box]]:
        return [{} if box is None else {"w": box} for box in self.ranks]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return tuple(draw(st.lists(st.integers(0, 9), max_size=4)))


@st.composite
def tilings(draw: st.DrawFn, shape: Shape) -> tuple[Box, ...]:
    """Cuts one of the boxes in two, again and again; empty boxes may come out."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[dim]))
        boxes += [
            Box(offset, (*size[:dim], at, *size[dim + 1 :])),
            Box(
                (*offset[:dim], offset[dim] + at, *offset[dim + 1 :]),
                (*size[:dim], size[dim] - at, *size[dim + 1 :]),
            ),
        ]
    return tuple(boxes)


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Each box has at least one holder; then come replicas and ranks without a piece."""
    shape = draw(shapes())
    boxes = draw(tilings(shape))
    more = draw(st.lists(st.sampled_from([*boxes, None]), max_size=5))
    return Cut(shape, boxes, tuple(draw(st.permutations([*boxes, *more]))))


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(*box, strict=True))


@given(cuts())
def test_every_value_is_written_exactly_once(cut: Cut) -> None:
    written = np.zeros(cut.shape, int)
    for box, names in zip(cut.ranks, writers(cut.held, {"w": cut.shape}), strict=True):
        if names:
            assert box is not None
            written[region(box)] += 1
    assert (written == 1).all()


@given(cuts())
def test_the_lowest_holder_of_a_piece_writes_it_and_nobody_writes_an_empty_one(cut: Cut) -> None:
    for rank, names in enumerate(writers(cut.held, {"w": cut.shape})):
        box = cut.ranks[rank]
        lowest = box is not None and box.values > 0 and cut.ranks.index(box) == rank
        assert names == ({"w"} if lowest else set())


@given(cuts(), st.data())
def test_a_hole_is_refused(cut: Cut, data: st.DataObject) -> None:
    full = [box for box in cut.boxes if box.values]
    assume(full)
    lost = data.draw(st.sampled_from(full))
    held = [{} if box in (None, lost) else {"w": box} for box in cut.ranks]
    with pytest.raises(ConfigError, match=r"^w: the ranks hold \d+ of its \d+ values"):
        writers(held, {"w": cut.shape})


@given(cuts(), st.data())
def test_an_overlap_is_refused(cut: Cut, data: st.DataObject) -> None:
    assume(cut.shape and 0 not in cut.shape)
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in cut.shape)
    size = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(offset, cut.shape, strict=True))
    extra = Box(offset, size)
    assume(extra not in cut.boxes)
    place = data.draw(st.integers(0, len(cut.ranks)))
    held = [*cut.held[:place], {"w": extra}, *cut.held[place:]]
    with pytest.raises(ConfigError, match="^w: two ranks hold pieces that overlap"):
        writers(held, {"w": cut.shape})


@given(cuts(), st.data())
def test_a_piece_outside_the_tensor_does_not_fill_a_hole_inside(
    cut: Cut, data: st.DataObject
) -> None:
    full = [box for box in cut.boxes if box.values]
    assume(cut.shape and full)
    lost = data.draw(st.sampled_from(full))
    dim = data.draw(st.integers(0, len(cut.shape) - 1))
    moved = list(lost.offset)
    moved[dim] += cut.shape[dim]
    outside = Box(tuple(moved), lost.shape)
    held = [{"w": outside if box == lost else box} for box in cut.ranks if box is not None]
    with pytest.raises(ConfigError, match="^w: "):
        writers(held, {"w": cut.shape})


def test_the_error_names_the_tensor_that_is_not_whole() -> None:
    held = [{"good": whole((4,)), "bad": Box((0,), (2,))}]
    with pytest.raises(ConfigError, match="^bad: the ranks hold 2 of its 4 values"):
        writers(held, {"good": (4,), "bad": (4,)})


def test_a_tensor_nobody_holds_is_refused_unless_it_is_empty() -> None:
    assert writers([{}, {}], {"w": (0, 3)}) == [set(), set()]
    with pytest.raises(ConfigError, match="^w: the ranks hold 0 of its 3 values"):
        writers([{}, {}], {"w": (3,)})


def test_a_scalar_on_every_rank_is_written_by_the_first() -> None:
    assert writers([{"w": whole(())}] * 3, {"w": ()}) == [{"w"}, set(), set()]


def test_disjoint_modules_are_each_written_by_their_own_rank() -> None:
    held = [{f"stage{rank}": whole((2, 3))} for rank in range(3)]
    shapes = {f"stage{rank}": (2, 3) for rank in range(3)}
    assert writers(held, shapes) == [{"stage0"}, {"stage1"}, {"stage2"}]
