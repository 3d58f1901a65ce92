"""Who reduces what: cells -> parts, one run of cells per owner.

Pure. Parts tile the fragment's cells; an owner's part grows with its measured rate; ownership is
sticky, because the owner's error feedback belongs to its cells: cells move only if the slowest owner
would be done at least 10 % earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from protocol.messages import IslandId, Part

GAIN_TO_MOVE = 0.10


def assign_parts(
    cell_values: Sequence[int],
    rates: Mapping[IslandId, float],
    previous: Sequence[Part] = (),
    max_owners: int = 16,
) -> tuple[Part, ...]:
    """Parts in cell order.

    Args:
        cell_values: size of each cell of the fragment.
        rates: upload rate of every island that may own cells, any unit; 0 = unknown, taken as the
            mean of the known ones.
        previous: parts of the fragment's last round.
    """
    if not rates:
        raise ValueError("a fragment needs at least one owner")
    known = [rate for rate in rates.values() if rate > 0]
    typical = sum(known) / len(known) if known else 1.0
    speed = {island: rate if rate > 0 else typical for island, rate in rates.items()}
    owners = sorted(sorted(speed, key=lambda i: (-speed[i], i))[:max_owners])
    fresh = _proportional(cell_values, owners, [speed[i] for i in owners])
    if _covers(previous, len(cell_values)) and all(part.owner in speed for part in previous):
        old_s, new_s = (_slowest_s(parts, cell_values, speed) for parts in (previous, fresh))
        if new_s > old_s * (1 - GAIN_TO_MOVE):
            return tuple(previous)
    return fresh


def _proportional(
    cell_values: Sequence[int], owners: Sequence[IslandId], weights: Sequence[float]
) -> tuple[Part, ...]:
    """Owner k's part ends at the cell boundary nearest to the k-th cumulative share of values."""
    ends = [0, *accumulate(cell_values)]
    scale = ends[-1] / sum(weights)
    parts, first = [], 0
    for owner, share in zip(owners, accumulate(weights), strict=True):
        goal = share * scale
        stop = first
        while stop < len(cell_values) and abs(ends[stop + 1] - goal) <= abs(ends[stop] - goal):
            stop += 1
        if owner == owners[-1]:
            stop = len(cell_values)
        if stop > first:
            parts.append(Part(owner, first, stop - first))
        first = stop
    return tuple(parts)


def _covers(parts: Sequence[Part], cells: int) -> bool:
    stop = 0
    for part in parts:
        if part.first_cell != stop:
            return False
        stop += part.cells
    return stop == cells and bool(parts)


def _slowest_s(
    parts: Sequence[Part], cell_values: Sequence[int], speed: Mapping[IslandId, float]
) -> float:
    return max(
        sum(cell_values[part.first_cell : part.first_cell + part.cells]) / speed[part.owner]
        for part in parts
    )
