"""Cells <-> chunks: a chunk carries whole cells; their sizes come from our own layout and codec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protocol.errors import BadFrame
from protocol.frames import Frame

CHUNK_BYTES = 256 << 10


def chunks(sizes: Sequence[int], first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Runs (first cell, cells) of at most CHUNK_BYTES, or one larger cell."""
    while first < stop:
        count, taken = 1, sizes[first]
        while first + count < stop and taken + sizes[first + count] <= CHUNK_BYTES:
            taken += sizes[first + count]
            count += 1
        yield first, count
        first += count


def cut_cells(frame: Frame, sizes: Sequence[int]) -> list[tuple[int, memoryview]]:
    """The cells of a chunk, numbered. A payload that is not theirs in size is a BadFrame."""
    stop = frame.first_cell + frame.cells
    if stop > len(sizes) or sum(sizes[frame.first_cell : stop]) != len(frame.payload):
        raise BadFrame(f"cells {frame.first_cell}..{stop} do not have {len(frame.payload)} bytes")
    cells, start = [], 0
    for cell in range(frame.first_cell, stop):
        cells.append((cell, memoryview(frame.payload)[start : start + sizes[cell]]))
        start += sizes[cell]
    return cells
