"""Every kind of mesh trains what one process trains: fp32, SGD with momentum, a clip that binds.

AdamW would hide a gradient of the wrong scale, and a clip that does not bind a norm that is wrong. One launch
runs all cases, for a launch costs seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).with_name("parity_child.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
KINDS = [
    "replicate",
    "shard",
    "hsdp",
    "tensor",
    "shard x tensor",
    "pipeline 1F1B",
    "pipeline, more microbatches",
    "shard x pipeline",
    "tensor x pipeline",
    "context",
    "context x shard",
    "expert",
    "expert x shard",
    "expert x replicate",
    "experts, not split",
    "microbatches",
    "zero 2",
    "activation checkpoints",
    "llama, shard",
    "llama, tied, shard",
    "llama, shard x tensor",
    "muon",
    "bf16",
    "bf16 pipeline",
]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-P", *TORCHRUN, "--nproc-per-node=4", str(CHILD)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_trains_what_one_process_trains(
    results: dict[str, dict[str, Any]], kind: str
) -> None:
    result = results[kind]
    of_losses, of_weights = result["tolerances"]
    assert result["loss"] <= of_losses
    assert result["held_out"] <= of_losses
    assert result["norm"] <= of_losses
    assert result["weights"] <= of_weights
    assert result["least_norm"] > result["clip"], "the clip must bind"
    assert result["moved"] > 1_000 * 1e-6, "there must be something to get wrong"
