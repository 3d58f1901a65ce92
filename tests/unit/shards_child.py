"""Boxes on every rank of an imagined world, each in a fork of its own: JSON lines [rank, rows, box]."""

from __future__ import annotations

import json
import os

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from node.shards import shard_of

RANKS, ROWS = 6, (7, 13, 19, 50_257)


def main() -> None:
    for rank in range(RANKS):
        if os.fork():
            assert os.wait()[1] == 0
            continue
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("shard", "tensor"))
        for rows in ROWS:
            model = nn.Sequential(nn.Linear(1, rows, bias=False))
            parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
            fully_shard(model, mesh=mesh["shard"])
            print(json.dumps([rank, rows, shard_of("weight", model[0].weight).box]), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
