"""One fragment's shared memory, seen as the model's parameters.

Three flat fp32 vectors: the snapshot, which the trainer writes, and two anchor slots, which the daemon
writes by turns: the slot last handed over stays untouched until the next one is applied. Parameters are
written in place and never rebound, whatever their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from node.edge_messages import FragmentLayout
from node.shared_buffer import SharedBuffer
from protocol.errors import InvariantBroken


class FragmentMemory:
    """`slot` is the anchor slot last handed to this trainer."""

    def __init__(
        self, layout: FragmentLayout, parameters: Mapping[str, Tensor], descriptors: Sequence[int]
    ) -> None:
        self.slot = 0
        self._layout = layout
        self._parameters = [parameters[tensor.name] for tensor in layout.tensors]
        self._buffers = [SharedBuffer.open(fd, layout.values) for fd in descriptors]
        self._snapshot, *self._anchors = [self._views(buffer) for buffer in self._buffers]

    def _views(self, buffer: SharedBuffer) -> list[Tensor]:
        flat = torch.from_numpy(buffer.values)
        return [
            flat[tensor.offset : tensor.offset + tensor.values].view(parameter.shape)
            for tensor, parameter in zip(self._layout.tensors, self._parameters, strict=True)
        ]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._parameters)

    @torch.no_grad()
    def write_snapshot(self) -> None:
        for place, parameter in zip(self._snapshot, self._parameters, strict=True):
            place.copy_(parameter)

    @torch.no_grad()
    def take_anchor(self, slot: int) -> None:
        """local := anchor"""
        for parameter, anchor in zip(self._parameters, self._anchors[slot], strict=True):
            parameter.copy_(anchor)
        self.slot = slot

    @torch.no_grad()
    def rebase(self, slot: int) -> None:
        """local += anchor in `slot` - anchor last handed over"""
        if slot == self.slot:
            raise InvariantBroken(f"the new anchor lies in slot {slot}, over the old one")
        anchors = zip(self._parameters, self._anchors[slot], self._anchors[self.slot], strict=True)
        for parameter, new, old in anchors:
            parameter.add_((new - old).to(parameter.device))
        self.slot = slot

    def close(self) -> None:
        self._snapshot, self._anchors = [], []
        for buffer in self._buffers:
            buffer.close()
