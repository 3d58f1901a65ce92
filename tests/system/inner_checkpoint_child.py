"""Under torchrun: takes up the optimizer state in FOLDER on this mesh, compares it with EXPECTED, saves it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from node.inner_checkpoint import InnerCheckpoint

torch.set_num_threads(1)
folder, expected = Path(sys.argv[1]), load_file(sys.argv[2])
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
checkpoint = InnerCheckpoint(folder, model, [optimizer])
assert checkpoint.load() == 3
for name, parameter in model.named_parameters():
    for key, value in optimizer.state[parameter].items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, expected[f"{key}.{name}"]), (name, key)
checkpoint.save(4)
dist.barrier()
dist.destroy_process_group()
