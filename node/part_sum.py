"""The owner's side of a part: what has arrived from whom, and the sum of it.

Sums run in fp32 in sorted island order, cell by cell from the first, and are encoded once. Per peer no
more than WINDOW_BYTES of cells are held: credit is granted up to `window_stop`, and summed cells are let
go. Every cell is checked against the leaf its sender signed, every norm against the sender's claim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from node.contribution import LEAF_BYTES, Contribution, split_leaf
from outer_optimizer.aggregate import add_weighted
from outer_optimizer.codec import Codec
from outer_optimizer.pseudo_gradient import squared_norm
from protocol.errors import BadFrame, InvariantBroken
from protocol.identity import short
from protocol.layout import Fragment
from protocol.merkle import DIGEST_BYTES, digest, leaf, root, verify_range
from protocol.messages import Digest, IslandId, Part, PartRoot, Plan

WINDOW_BYTES = 4 << 20  # at least one chunk: a chunk is summed when all of it is there
_NORM_TOLERANCE = 1e-4


@dataclass
class _Sender:
    """What one other participant has sent of this part."""

    leaves: list[tuple[Digest, float]] = field(default_factory=list)
    cells: dict[int, memoryview] = field(default_factory=dict)


class PartSum:
    """`own` = the owner's contribution, None if it is no participant."""

    def __init__(
        self,
        plan: Plan,
        part: Part,
        fragment: Fragment,
        codec: Codec,
        own: Contribution | None,
        me: IslandId,
    ) -> None:
        self._plan, self.part, self._fragment, self._codec = plan, part, fragment, codec
        self._own, self._me = own, me
        self._sizes = [codec.encoded_bytes(cell.lengths) for cell in fragment.cells]
        self._senders = {p.island: _Sender() for p in plan.participants if p.island != me}
        self._leaves: list[Digest] = []
        self._norms = np.zeros(len(fragment.tensors))
        self.summed_to = part.first_cell

    @property
    def senders(self) -> Sequence[IslandId]:
        return list(self._senders)

    # --- what arrives --------------------------------------------------------------------------

    def take_leaves(self, sender: IslandId, cells: tuple[int, int], payload: bytes) -> None:
        """Leaves of all cells of the part, then their proof."""
        participant = self._plan.participant(sender)
        if participant is None or sender not in self._senders or cells != self.part[1:]:
            raise BadFrame("leaves of a part that is not ours")
        split = self.part.cells * LEAF_BYTES
        contents = [payload[i : i + LEAF_BYTES] for i in range(0, split, LEAF_BYTES)]
        proof = [payload[i : i + DIGEST_BYTES] for i in range(split, len(payload), DIGEST_BYTES)]
        leaves = [leaf(content) for content in contents]
        first, total = self.part.first_cell, len(self._fragment.cells)
        if not verify_range(participant.root, total, first, leaves, proof):
            raise BadFrame("leaves that do not lead to the contribution's root")
        self._senders[sender].leaves = [split_leaf(content) for content in contents]

    def take_cells(self, sender: IslandId, cells: Sequence[tuple[int, memoryview]]) -> None:
        state = self._senders.get(sender)
        if state is None or not state.leaves:
            raise BadFrame("cells that nobody asked for")
        window = range(self.part.first_cell, self.window_stop())
        for number, data in cells:
            if number not in window:
                raise BadFrame("cells beyond the granted credit")
            if number < self.summed_to:
                continue
            if digest(data) != state.leaves[number - self.part.first_cell][0]:
                raise BadFrame(f"cell {number} is not the one that was signed")
            state.cells[number] = data

    def arrived(self, cells: range) -> bool:
        return all(cell in sender.cells for sender in self._senders.values() for cell in cells)

    def next_missing(self, sender: IslandId) -> int:
        """First cell that is still to come from this sender."""
        cell = self.summed_to
        while cell in self._senders[sender].cells:
            cell += 1
        return cell

    def window_stop(self) -> int:
        """Credit may be granted up to here."""
        stop, taken = self.summed_to, 0
        while stop < self.part.stop_cell and (
            taken == 0 or taken + self._sizes[stop] <= WINDOW_BYTES
        ):
            taken += self._sizes[stop]
            stop += 1
        return stop

    def held_bytes(self, sender: IslandId) -> int:
        return sum(len(data) for data in self._senders[sender].cells.values())

    # --- the sum -------------------------------------------------------------------------------

    def sum_cells(self, cells: range) -> list[bytes]:
        """Encoded sums of cells that have all arrived. Blocking; call it for one run at a time."""
        return [self._sum_cell(cell) for cell in cells]

    def let_go(self, cells: range) -> None:
        """These are summed."""
        for sender in self._senders.values():
            for cell in cells:
                del sender.cells[cell]
        self.summed_to = cells.stop

    def part_root(self, plan_id: Digest) -> PartRoot:
        """To be signed, once all cells are summed."""
        return PartRoot(
            run_id=self._plan.run_id,
            plan_id=plan_id,
            first_cell=self.part.first_cell,
            cells=self.part.cells,
            root=root(self._leaves),
            residual_before=b"",
            residual_after=b"",
            squared_norms=tuple(float(norm) for norm in self._norms),
        )

    def _sum_cell(self, number: int) -> bytes:
        cell = self._fragment.cells[number]
        total, values, scratch = (np.zeros(cell.values, np.float32) for _ in range(3))
        for participant in self._plan.participants:
            data, claim = self._contributed(participant.island, number)
            self._codec.decode(data, cell.lengths, values)
            self._check_norm(participant.island, squared_norm(values), claim)
            add_weighted(total, values, np.float32(participant.weight), scratch)
        encoded = self._codec.encode(total, cell.lengths)
        self._codec.decode(encoded, cell.lengths, total)
        start = 0
        for tensor, count in cell.segments:
            self._norms[tensor] += squared_norm(total[start : start + count])
            start += count
        self._leaves.append(leaf(digest(encoded)))
        return encoded

    def _check_norm(self, island: IslandId, norm: float, claim: float) -> None:
        close = abs(norm - claim) <= _NORM_TOLERANCE * max(norm, claim)
        if not (math.isfinite(claim) and close):
            raise InvariantBroken(
                f"{short(island)} signed a squared norm of {claim} for a cell whose own is {norm}: "
                "its contribution is false"
            )

    def _contributed(self, island: IslandId, cell: int) -> tuple[bytes | memoryview, float]:
        if island != self._me:
            sender = self._senders[island]
            return sender.cells[cell], sender.leaves[cell - self.part.first_cell][1]
        if self._own is None:
            raise InvariantBroken("the plan lists a contribution that is not here")
        return self._own.cells[cell], split_leaf(self._own.leaf_contents[cell])[1]
