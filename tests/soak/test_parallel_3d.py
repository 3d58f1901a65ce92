"""Three axes at once, on eight ranks: against one process, as in system/test_parallel_parity.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).parent.parent / "system" / "parity_child.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]


@pytest.mark.timeout(900)
def test_three_axes_train_what_one_process_trains() -> None:
    done = subprocess.run(
        [sys.executable, "-P", *TORCHRUN, "--nproc-per-node=8", str(CHILD)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["case"] for result in results] == [
        "shard x tensor x pipeline",
        "replicate x shard x tensor",
        "replicate x shard x context",
        "replicate x shard x expert",
    ]
    for result in results:
        of_losses, of_weights = result["tolerances"]
        assert max(result["loss"], result["held_out"], result["norm"]) <= of_losses, result
        assert result["weights"] <= of_weights, result
        assert result["least_norm"] > result["clip"], "the clip must bind"
