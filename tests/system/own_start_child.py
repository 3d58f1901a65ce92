"""One of two ranks: shards a model, saves its start state, and exits. FOLDER is the argument."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import atoll


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).bfloat16())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    mine = folder / f"rank{dist.get_rank()}.safetensors"
    atoll.save_start(model, mine)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
