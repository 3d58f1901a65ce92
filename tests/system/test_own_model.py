"""A model of one's own, from `save_start` to the final model, in the words a user types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

SCRIPT = Path(__file__).with_name("own_model.py")
SPEC = """
name = "own"
target_tokens = 640
[model]
recipe = "own"
[outer]
inner_steps = 5
[sync]
expected_islands = 2
"""


def atoll(*words: str) -> list[str]:
    return [sys.executable, "-m", "atoll", *words]


def test_two_islands_train_a_model_that_only_their_script_can_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    Path("spec.toml").write_text(SPEC)
    script = (sys.executable, str(SCRIPT))
    subprocess.run([*script, "save", "own.safetensors"], check=True, timeout=60)
    init = atoll("run", "init", "run", "--spec", "spec.toml", "--weights", "own.safetensors")
    subprocess.run(init, check=True, timeout=60)
    start = subprocess.Popen(
        atoll("run", "start", "run", "--listen", "127.0.0.1:0"), stdout=subprocess.PIPE, text=True
    )
    processes = [start]
    assert start.stdout is not None
    try:
        address = next(line for line in start.stdout if "atoll join" in line).split()[2]
        for name in ("north", "south"):
            words = atoll("join", address, "--name", name, "--", *script)
            processes.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))
        assert [process.wait(100) for process in processes[1:]] == [0, 0]
        assert start.wait(30) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
        start.stdout.close()
    north, south = (Path("runs", name, "final.safetensors") for name in ("north", "south"))
    assert north.read_bytes() == south.read_bytes()
    began, ended = load_file("run/start.safetensors"), load_file(north)
    assert list(began) == list(ended)
    assert set(began) == {"0.weight", "2.weight", "2.bias"}
    assert not any(np.array_equal(began[name], ended[name]) for name in began)
