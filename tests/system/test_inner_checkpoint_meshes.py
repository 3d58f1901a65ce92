"""Inner checkpoints across meshes, through real torchrun ranks: one rank -> 2 x 2 -> one rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from node.inner_checkpoint import InnerCheckpoint

CHILD = Path(__file__).with_name("inner_checkpoint_child.py")
torch.set_num_threads(1)


def trainer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{key}.{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def test_optimizer_state_survives_a_change_of_mesh_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = trainer()
    for _ in range(3):
        model(torch.rand(4, 7)).square().sum().backward()
        optimizer.step()
    before = state_of(model, optimizer)
    save_file(before, tmp_path / "expected.safetensors")
    folder = tmp_path / "inner"
    InnerCheckpoint(folder, model, [optimizer]).save(3)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [sys.executable, *torchrun, "--nproc-per-node=4", str(CHILD), str(folder)]
        + [str(tmp_path / "expected.safetensors")],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    model, optimizer = trainer()
    assert InnerCheckpoint(folder, model, [optimizer]).load() == 4
    after = state_of(model, optimizer)
    assert after.keys() == before.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
