"""A parameter as one rank holds it: a local tensor, and the box of the whole tensor it is.

The whole tensor lies row by row in a flat vector that all ranks share. A rank copies its piece in and out
through a view of the box, so no rank needs to know of any other, and no collective is called.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, placement_types

from node.tiling import Box, Shape, whole
from protocol.errors import ConfigError


@dataclass(frozen=True)
class Shard:
    """`local` shares its memory with the parameter: write it in place, never rebind it."""

    shape: Shape
    box: Box
    local: Tensor


def view_of(flat: Tensor, shape: Shape, box: Box) -> Tensor:
    """The view of `box` in `flat`, which holds the values of one tensor of `shape`."""
    place = flat.view(shape)
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        place = place.narrow(dim, offset, size)
    return place


def shard_of(name: str, parameter: Tensor) -> Shard:
    """Raises ConfigError for a DTensor whose local values are not values of the whole tensor."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Shard(shape, whole(shape), parameter.detach())
    if any(placement.is_partial() for placement in parameter.placements):
        raise ConfigError(f"{name}: holds partial sums ({parameter.placements}): not supported")
    box, local = _box_of(parameter), parameter.to_local().detach()
    if tuple(local.shape) != box.shape:
        raise ConfigError(
            f"{name}: its local tensor is {list(local.shape)} where {list(box.shape)} is expected"
        )
    if not local.numel():  # an empty piece may claim to begin past the end
        return Shard(shape, Box((0,) * len(shape), tuple(local.shape)), local)
    return Shard(shape, box, local)


def _box_of(parameter: DTensor) -> Box:
    """Plain shards cut first, in mesh order; strided ones, FSDP2's, cut what those have left."""
    offset, size = [0] * parameter.dim(), list(parameter.shape)
    placed = list(enumerate(parameter.placements))
    strided = [
        (axis, p) for axis, p in reversed(placed) if isinstance(p, placement_types._StridedShard)
    ]
    plain = [(axis, p) for axis, p in placed if type(p) is placement_types.Shard]
    for axis, placement in plain + strided:
        ranks = parameter.device_mesh.size(axis)
        rank, dim = parameter.device_mesh.get_local_rank(axis), placement.dim
        step = -(-size[dim] // ranks)
        start = min(rank * step, size[dim])
        offset[dim] += start
        size[dim] = min(step, size[dim] - start)
    return Box(tuple(offset), tuple(size))


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`, a DTensor or a plain one; gradients flow through."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def load_whole(name: str, parameter: Tensor, values: Tensor) -> None:
    """Copies this rank's piece of `values`, the whole tensor, into `parameter`."""
    shard = shard_of(name, parameter)
    shard.local.copy_(view_of(values.reshape(-1), shard.shape, shard.box))
