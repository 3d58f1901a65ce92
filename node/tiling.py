"""Which rank writes which piece of which tensor, so that every element is written exactly once.

Each rank holds a *box* of each of its tensors: equal boxes are replicas, and the lowest rank that holds one
writes it; every holder reads. Boxes that are not equal must be disjoint, and together they must fill the
tensor. Pure: from what all ranks hold, every rank computes the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from protocol.errors import ConfigError

Shape = tuple[int, ...]


class Box(NamedTuple):
    """`shape[d]` consecutive indices from `offset[d]` on, in every dim d of a tensor."""

    offset: Shape
    shape: Shape

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    def meets(self, other: Box) -> bool:
        return all(
            a < b + m and b < a + n
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )


def whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), shape)


def writers(held: Sequence[Mapping[str, Box]], shapes: Mapping[str, Shape]) -> list[set[str]]:
    """Per rank, the tensors whose piece it writes; `held[r]` is what rank r holds.

    Raises ConfigError, naming the tensor, if the pieces overlap, leave a hole or lie outside.
    """
    mine: list[set[str]] = [set() for _ in held]
    for name, shape in shapes.items():
        first = _first_holders(name, held)
        _check_tiling(name, shape, list(first))
        for rank in first.values():
            mine[rank].add(name)
    return mine


def _first_holders(name: str, held: Sequence[Mapping[str, Box]]) -> dict[Box, int]:
    first: dict[Box, int] = {}
    for rank, boxes in enumerate(held):
        if name in boxes and boxes[name].values:
            first.setdefault(boxes[name], rank)
    return first


def _check_tiling(name: str, shape: Shape, boxes: Sequence[Box]) -> None:
    for box in boxes:
        if any(a + n > size for a, n, size in zip(*box, shape, strict=True)):
            raise ConfigError(f"{name}: a rank holds {box}, which is not inside {list(shape)}")
    for a, b in _neighbours(boxes):
        if a.meets(b):
            raise ConfigError(
                f"{name}: two ranks hold pieces that overlap, {a} and {b}: this wrapper is not supported"
            )
    held, wanted = sum(box.values for box in boxes), math.prod(shape)
    if held != wanted:
        raise ConfigError(
            f"{name}: the ranks hold {held} of its {wanted} values: attach every part of the model"
        )


def _neighbours(boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """All pairs that can meet: in the dim that is cut most often, one begins before the other ends."""
    if len(boxes) < 2:
        return
    dims = range(len(boxes[0].shape))
    dim = max(dims, key=lambda d: len({box.offset[d] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box.offset[dim])
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if b.offset[dim] >= a.offset[dim] + a.shape[dim]:
                break
            yield a, b
