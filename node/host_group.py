"""All trainer ranks of one island, talking on their hosts: gloo, beside whatever joins the devices.

Used when a trainer attaches and at edge steps, never in between. Messages are bytes and numbers, so nothing
is pickled. There is no time-out: rank 0 may wait for a frozen daemon for days, and the others wait for
rank 0. A rank that dies closes its connections, and that ends every wait at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from protocol.errors import ConfigError, TransportError

_HOST = torch.device("cpu")  # whatever a script has made its default
_NO_TIMEOUT = timedelta(days=3_650)


class RankLost(TransportError):
    """Another rank of this island has gone; the island's ranks start again together."""


class HostGroup:
    """To be made on all ranks at the same point. One rank alone needs no process group."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)
        elif os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                f"this script has WORLD_SIZE = {os.environ['WORLD_SIZE']} ranks that do not know each "
                f"other: call torch.distributed.init_process_group() before atoll.attach()"
            )

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's `data`, on every rank."""
        if self.size == 1:
            return data
        size = torch.tensor([len(data)], device=_HOST)
        self._call(dist.broadcast, size, 0)
        buffer = (
            _tensor_of(data)
            if self.rank == 0
            else torch.empty(int(size), dtype=torch.uint8, device=_HOST)
        )
        self._call(dist.broadcast, buffer, 0)
        return buffer.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, in rank order, on every rank."""
        sizes = [int(row[0]) for row in self.numbers([len(data)])]
        if self.size == 1:
            return [data]
        padded = _tensor_of(data.ljust(max(sizes), b"\0"))
        rows = [torch.empty_like(padded) for _ in sizes]
        self._call(dist.all_gather, rows, padded)
        return [row.numpy()[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's row of `values`, all of one length. Nobody returns before all have called."""
        own = torch.tensor(values, dtype=torch.float64, device=_HOST)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        if self.size == 1:
            rows = [own]
        else:
            self._call(dist.all_gather, rows, own)
        return [row.tolist() for row in rows]

    def send(self, values: Tensor, rank: int) -> None:
        self._call(dist.send, values, rank)

    def receive(self, values: Tensor, rank: int) -> None:
        """Fills `values`, a contiguous CPU tensor, with what `rank` sends."""
        self._call(dist.recv, values, rank)

    def _call(self, operation: Callable[..., Any], *arguments: Any) -> None:
        try:
            operation(*arguments, group=self._group)
        except RuntimeError as error:
            raise RankLost(f"another rank of this island has gone: {str(error)[:200]}") from None


def _tensor_of(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=_HOST)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
