"""One fragment's snapshot and anchors, seen as the pieces one rank holds.

Three flat fp32 vectors hold the whole fragment: the snapshot, which the ranks write together, and two
anchor slots, which the daemon writes by turns: the slot last handed over stays untouched until the next
one is applied. A rank sees its boxes of them, as views. Parameters are written in place and never rebound,
whatever their dtype and wherever they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from node.edge_messages import FragmentLayout
from node.parameters import Piece
from node.shards import view_of
from node.shared_buffer import SharedBuffer
from node.tiling import Box, Shape
from protocol.errors import InvariantBroken

BUFFERS = 3  # per fragment: snapshot, anchor 0, anchor 1

Places = Mapping[str, Tensor]  # tensor name -> view of a piece in one flat vector


def boxes_in(layout: FragmentLayout, boxes: Mapping[str, Box]) -> dict[str, Box]:
    """Those of one fragment, in its order."""
    return {slot.name: boxes[slot.name] for slot in layout.tensors if slot.name in boxes}


def places_in(
    buffer: SharedBuffer,
    layout: FragmentLayout,
    boxes: Mapping[str, Box],
    shapes: Mapping[str, Shape],
) -> dict[str, Tensor]:
    """Views of `boxes` in one shared vector of the fragment."""
    flat = torch.from_numpy(buffer.values)
    return {
        slot.name: view_of(
            flat[slot.offset : slot.offset + slot.values], shapes[slot.name], boxes[slot.name]
        )
        for slot in layout.tensors
        if slot.name in boxes
    }


class FragmentMemory:
    """`slot` is the anchor slot last handed to this trainer; `places` are of the three vectors."""

    def __init__(
        self, pieces: Sequence[Piece], writes: AbstractSet[str], places: Sequence[Places]
    ) -> None:
        self.slot = 0
        self._pieces = pieces
        snapshot, *anchors = places
        self._written = [
            (piece.shard.local, snapshot[piece.name])
            for piece in {p.name: p for p in pieces if p.name in writes}.values()
        ]
        self._anchors = [[anchor[piece.name] for piece in pieces] for anchor in anchors]

    def __iter__(self) -> Iterator[Tensor]:
        return (piece.shard.local for piece in self._pieces)

    @torch.no_grad()
    def write_snapshot(self) -> None:
        for local, place in self._written:
            place.copy_(local)

    def take_anchor(self, slot: int) -> None:
        """local := anchor"""
        self.restore(self._anchors[slot])
        self.slot = slot

    @torch.no_grad()
    def rebase(self, slot: int) -> None:
        """local += anchor in `slot` - anchor last handed over"""
        if slot == self.slot:
            raise InvariantBroken(f"the new anchor lies in slot {slot}, over the old one")
        anchors = zip(self, self._anchors[slot], self._anchors[self.slot], strict=True)
        for local, new, old in anchors:
            local.add_((new - old).to(local.device))
        self._show()
        self.slot = slot

    @torch.no_grad()
    def restore(self, values: Sequence[Tensor]) -> None:
        """local := `values`, one per piece"""
        for local, value in zip(self, values, strict=True):
            local.copy_(value)
        self._show()

    def _show(self) -> None:
        """Masters have moved: the model's own copies follow."""
        for piece in self._pieces:
            if piece.shadow is not None:
                piece.shadow.copy_(piece.shard.local)
