"""What the ranks of an island hold between them: agreed once, when the trainer attaches.

Every rank tells every other its names, shapes, dtypes and boxes, and whether it sees the daemon. From that
all compute the same: the whole model's layout, who writes which piece, and who stands in for ranks on
other hosts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from node.host_group import HostGroup
from node.parameters import Piece
from node.tiling import Box, Shape, writers
from protocol.errors import ConfigError
from protocol.layout import TensorLayout


@dataclass(frozen=True)
class Crew:
    """Per rank: `boxes` it holds, names it `writes`, and whether it is `local` to the daemon."""

    layout: tuple[TensorLayout, ...]
    boxes: tuple[dict[str, Box], ...]
    writes: tuple[set[str], ...]
    local: tuple[bool, ...]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {tensor.name: tensor.shape for tensor in self.layout}


def muster(pieces: Sequence[Piece], local: bool, host: HostGroup) -> Crew:
    """Called on all ranks. Raises ConfigError, on all alike, if their pieces do not make one model."""
    own = [(p.name, p.shard.shape, p.dtype, *p.shard.box) for p in pieces]
    told = [json.loads(line) for line in host.gather(json.dumps([local, own]).encode())]
    layout: dict[str, TensorLayout] = {}
    boxes: list[dict[str, Box]] = []
    for _, rows in told:
        held: dict[str, Box] = {}
        for name, shape, dtype, offset, size in rows:
            tensor = TensorLayout(name, tuple(shape), dtype)
            if layout.setdefault(name, tensor) != tensor:
                raise ConfigError(f"{name}: ranks hold it as {tensor} and as {layout[name]}")
            box = Box(tuple(offset), tuple(size))
            if held.setdefault(name, box) != box:
                raise ConfigError(f"{name}: one rank holds two different pieces of it")
        boxes.append(held)
    shapes = {name: tensor.shape for name, tensor in layout.items()}
    return Crew(
        tuple(layout.values()),
        tuple(boxes),
        tuple(writers(boxes, shapes)),
        tuple(is_local for is_local, _ in told),
    )
