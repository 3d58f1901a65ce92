"""`atoll.save_start` on sharded ranks: whole tensors, written once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from node.weights_file import open_weights

CHILD = Path(__file__).with_name("own_start_child.py")


def test_ranks_that_share_a_model_write_it_whole_and_once(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [sys.executable, *torchrun, "--nproc-per-node=2", str(CHILD), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.safetensors"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).bfloat16())
    stored = open_weights(tmp_path / "rank0.safetensors")
    assert list(stored) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(torch.from_numpy(stored[name].read()), parameter.detach().float())
