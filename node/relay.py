"""Ranks of an island that are not on the daemon's host: their pieces go through a rank that is.

Shared memory ends at the host, so a *remote* rank keeps its own boxes of each fragment in private memory,
and a *proxy* beside the daemon copies them to and from the shared vectors. They talk over the island's host
group. Every rank works out from `local` alone who stands in for whom: no negotiation.

The daemon does not know of it. Its host carries all the island's traffic to the world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from node.host_group import HostGroup
from node.tiling import Box


def proxy_of(rank: int, local: Sequence[bool]) -> int:
    """The rank beside the daemon that stands in for `rank`; remote ranks are dealt out in turn."""
    beside = [r for r, is_local in enumerate(local) if is_local]
    return beside[sum(not is_local for is_local in local[:rank]) % len(beside)]


class Remote:
    """A remote rank's own end: private memory for its boxes, one flat vector per shared one."""

    def __init__(self, host: HostGroup, proxy: int, boxes: Mapping[str, Box], vectors: int) -> None:
        self._host, self._proxy = host, proxy
        size = sum(box.values for box in boxes.values())
        self._flats = [torch.zeros(size, dtype=torch.float32, device="cpu") for _ in range(vectors)]
        self.places = [_cut(flat, boxes) for flat in self._flats]

    def push(self) -> None:
        """The snapshot, to the proxy."""
        self._host.send(self._flats[0], self._proxy)

    def pull(self, slot: int) -> None:
        """The anchor of `slot`, from the proxy."""
        self._host.receive(self._flats[1 + slot], self._proxy)


class Proxy:
    """The end beside the daemon: moves one remote rank's boxes of one fragment."""

    def __init__(
        self,
        host: HostGroup,
        remote: int,
        boxes: Mapping[str, Box],
        writes: AbstractSet[str],
        shared: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self._host, self._remote = host, remote
        self._boxes, self._writes, self._shared = boxes, writes, shared
        size = sum(box.values for box in boxes.values())
        self._flat = torch.zeros(size, dtype=torch.float32, device="cpu")

    def push(self) -> None:
        """What the remote rank is to write, into the shared snapshot."""
        self._host.receive(self._flat, self._remote)
        for name, values in _cut(self._flat, self._boxes).items():
            if name in self._writes:
                self._shared[0][name].copy_(values)

    def pull(self, slot: int) -> None:
        """The remote rank's boxes of the shared anchor in `slot`, to it."""
        for name, values in _cut(self._flat, self._boxes).items():
            values.copy_(self._shared[1 + slot][name])
        self._host.send(self._flat, self._remote)


def _cut(flat: Tensor, boxes: Mapping[str, Box]) -> dict[str, Tensor]:
    places, start = {}, 0
    for name, box in boxes.items():
        places[name] = flat[start : start + box.values].view(box.shape)
        start += box.values
    return places
