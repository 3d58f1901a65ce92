"""The words a user types: init, start, join; ended by finish, with the final model in every island's hands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

SPEC = """
name = "mine"
target_tokens = 2_560
[model]
width = 16
depth = 1
heads = 2
context = 16
[data]
text = ["{text}"]
eval_sequences = 8
[inner]
batch_size = 4
[outer]
inner_steps = 10
[sync]
expected_islands = 2
"""


def atoll(*words: str) -> list[str]:
    return [sys.executable, "-m", "atoll", *words]


def test_init_start_and_two_joins_end_with_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    Path("text.txt").write_text("double, double toil and trouble; fire burn " * 1_000)
    Path("spec.toml").write_text(SPEC.format(text=tmp_path / "text.txt"))
    subprocess.run(atoll("run", "init", "run", "--spec", "spec.toml"), check=True, timeout=60)
    processes = [
        subprocess.Popen(
            atoll("run", "start", "run", "--listen", "127.0.0.1:0"),
            stdout=subprocess.PIPE,
            text=True,
        )
    ]
    start = processes[0]
    assert start.stdout is not None
    try:
        address = next(line for line in start.stdout if "atoll join" in line).split()[2]
        for name in ("north", "south"):
            words = ("join", address, "--name", name, "--json", f"{name}.json")
            processes.append(subprocess.Popen(atoll(*words), stderr=subprocess.DEVNULL))
        assert [process.wait(100) for process in processes[1:]] == [0, 0]
        assert start.wait(30) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
        start.stdout.close()
    models = [Path("runs", name, "final.safetensors") for name in ("north", "south")]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert load_file(models[0]).keys() == load_file("run/start.safetensors").keys()
    result = json.loads(Path("north.json").read_text())
    assert (result["tokens"], result["inner_steps"]) == (1_280, 20)
