"""examples/own_training_loop, as its README says: a script of one's own on two islands, one with two ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_training_loop"
MARKED_LINES = 5
STEPS, TOKENS = 40, 16 * 64


def atoll(*words: str) -> list[str]:
    return [sys.executable, "-m", "atoll", *words]


def torchrun(ranks: int) -> list[str]:
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, "train.py"]


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_example_ends_with_one_model_on_islands_of_one_and_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    spec = Path("run.toml").read_text()
    Path("run.toml").write_text(spec.replace("819_200", str(2 * STEPS * TOKENS)))
    subprocess.run([sys.executable, "make_start.py"], check=True, timeout=60)
    init = atoll("run", "init", "myrun", "--spec", "run.toml", "--weights", "start.safetensors")
    subprocess.run(init, check=True, timeout=60, stdout=subprocess.DEVNULL)
    with started(*atoll("run", "start", "myrun", "--listen", "127.0.0.1:0")) as start:
        assert start.stdout is not None
        address = next(line for line in start.stdout if "atoll join" in line).split()[2]
        north = atoll("join", address, "--name", "north", "--", *torchrun(1))
        south = atoll("join", address, "--name", "south", "--", *torchrun(2))
        with started(*north) as first, started(*south) as second:
            assert [first.wait(90), second.wait(30)] == [0, 0]
        assert start.wait(30) == 0
    models = [Path("runs", name, "final.safetensors") for name in ("north", "south")]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert models[0].read_bytes() != Path("start.safetensors").read_bytes()
    for name in ("north", "south"):
        assert f"step {STEPS}  loss" in Path("runs", name, "trainer.log").read_text()


def test_five_marked_lines_are_all_that_the_loop_needs() -> None:
    lines = (EXAMPLE / "train.py").read_text().split('"""', 2)[2].splitlines()
    ours = [line for line in lines if "island" in line or "atoll" in line]
    assert len(ours) == MARKED_LINES
    assert all(line.endswith("  # atoll") for line in ours)
