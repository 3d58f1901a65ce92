"""Boxes of DTensors that FSDP2 and tensor parallelism have cut unevenly, on ranks that are only imagined."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from node.shards import shard_of


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of a world of six that does no communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=6)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("rank", range(6), indirect=True)
@pytest.mark.parametrize("rows", [7, 13, 19, 50_257])
def test_rows_that_do_not_divide_have_the_box_that_fsdp_gave_them(rank: int, rows: int) -> None:
    """Tensor parallelism over 2 cuts first, FSDP2 over 3 cuts what is left, each into ceiling-sized runs."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("shard", "tensor"))
    layer = nn.Sequential(nn.Linear(1, rows, bias=False))
    parallelize_module(layer, mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(layer, mesh=mesh["shard"])
    shard = shard_of("weight", layer[0].weight)
    half = -(-rows // 2)
    first, size = (0, half) if rank % 2 == 0 else (half, rows - half)
    step = -(-size // 3)
    mine = range(rows)[first : first + size][rank // 2 * step : (rank // 2 + 1) * step]
    assert shard.box.shape == (len(mine), 1)
    if mine:
        assert shard.box.offset == (mine.start, 0)
