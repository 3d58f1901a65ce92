"""Where every parameter lies: tensors -> fragments -> cells.

The layout is a pure function of the model's parameters (name, shape, dtype, in the order of
`named_parameters()` of the whole model) and of two agreed numbers, so every island computes the same
one whatever its mesh. A fragment is one flat fp32 vector: first its *large* tensors (at least
`cell_values` values) in layout order, each with cells of its own, then all others, concatenated in
layout order into one virtual tensor. The last cell of each (virtual) tensor may be short.

Invariants: fragments tile the tensors; cells tile the fragment; a cell's segments tile the cell and
each lies in one tensor, so no codec block or norm straddles two tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from protocol.errors import ConfigError

CELL_STEP = 4_096
MAX_CELL_VALUES = 1 << 18


class TensorLayout(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def values(self) -> int:
        return math.prod(self.shape)


class Segment(NamedTuple):
    """`values` consecutive values of tensor number `tensor` of the fragment."""

    tensor: int
    values: int


class Cell(NamedTuple):
    start: int
    segments: tuple[Segment, ...]

    @property
    def values(self) -> int:
        return sum(segment.values for segment in self.segments)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(segment.values for segment in self.segments)


@dataclass(frozen=True)
class Fragment:
    """Tensors in layout order, with `offsets[i]` = place of tensor i in the flat vector."""

    tensors: tuple[TensorLayout, ...]
    offsets: tuple[int, ...]
    cells: tuple[Cell, ...]

    @cached_property
    def values(self) -> int:
        return sum(tensor.values for tensor in self.tensors)


@dataclass(frozen=True)
class Layout:
    tensors: tuple[TensorLayout, ...]
    fragments: tuple[Fragment, ...]

    @cached_property
    def values(self) -> int:
        return sum(fragment.values for fragment in self.fragments)


def build_layout(
    tensors: Sequence[TensorLayout], fragments: int, cell_values: int | None, islands: int
) -> Layout:
    """`cell_values` None = sized so that each of `islands` owners has about eight cells."""
    groups = _split(tensors, fragments)
    return Layout(tuple(tensors), tuple(_fragment(group, cell_values, islands) for group in groups))


def _split(tensors: Sequence[TensorLayout], fragments: int) -> list[list[TensorLayout]]:
    """Runs of tensors of about equal size, in layout order."""
    total = sum(tensor.values for tensor in tensors)
    if not total:
        raise ConfigError("the model has no trainable values")
    groups: list[list[TensorLayout]] = [[] for _ in range(fragments)]
    before = 0
    for tensor in tensors:
        middle = before + tensor.values // 2
        groups[min(fragments - 1, middle * fragments // total)].append(tensor)
        before += tensor.values
    if not all(sum(tensor.values for tensor in group) for group in groups):
        raise ConfigError(
            f"outer.fragments = {fragments} is more than this model's tensors can be cut into: lower it"
        )
    return groups


def default_cell_values(fragment_values: int, islands: int) -> int:
    per_owner = fragment_values // (8 * islands)
    return max(CELL_STEP, min(MAX_CELL_VALUES, per_owner // CELL_STEP * CELL_STEP))


def _fragment(tensors: Sequence[TensorLayout], cell_values: int | None, islands: int) -> Fragment:
    size = cell_values or default_cell_values(sum(t.values for t in tensors), islands)
    large = [i for i, tensor in enumerate(tensors) if tensor.values >= size]
    small = [i for i, tensor in enumerate(tensors) if tensor.values < size]
    offsets, cells, start = [0] * len(tensors), [], 0
    for i in large:
        offsets[i] = start
        cells += _cut(start, [Segment(i, tensors[i].values)], size)
        start += tensors[i].values
    virtual = start
    for i in small:
        offsets[i] = start
        start += tensors[i].values
    cells += _cut(virtual, [Segment(i, tensors[i].values) for i in small], size)
    return Fragment(tuple(tensors), tuple(offsets), tuple(cells))


def _cut(start: int, segments: Sequence[Segment], size: int) -> list[Cell]:
    """Cuts a run of segments that begins at `start` into cells of `size` values."""
    cells: list[Cell] = []
    current: list[Segment] = []
    room = size
    for tensor, values in segments:
        while values:
            taken = min(values, room)
            current.append(Segment(tensor, taken))
            values, room = values - taken, room - taken
            if not room:
                cells.append(Cell(start, tuple(current)))
                start, current, room = start + size, [], size
    return cells + [Cell(start, tuple(current))] if current else cells


def first_difference(mine: Sequence[TensorLayout], run: Sequence[TensorLayout]) -> str | None:
    """One line on the first parameter in which a model differs from the run's, or None.

    Names tell which is which: a pipeline's ranks do not hold them in the model's order.
    """
    held, wanted = {tensor.name: tensor for tensor in mine}, {tensor.name for tensor in run}
    strangers = [tensor for tensor in mine if tensor.name not in wanted]
    for number, b in enumerate(run):
        a = held.get(b.name) or (strangers[0] if strangers else None)
        if a is None:
            return f"parameter {number}: this model lacks {b.name} {list(b.shape)} {b.dtype}"
        if a != b:
            return (
                f"parameter {number}: this model has {a.name} {list(a.shape)} {a.dtype}, "
                f"the run has {b.name} {list(b.shape)} {b.dtype}"
            )
    if strangers:
        a = strangers[0]
        return f"this model has {a.name} {list(a.shape)} {a.dtype}, which the run lacks"
    return None
