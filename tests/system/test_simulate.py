"""The simulator with real processes, real gRPC and real torch; and that it never leaves a process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SPEC = """
name = "tiny"
target_tokens = {tokens}
[model]
width = 16
depth = 1
heads = 2
context = 16
[data]
text = ["{text}"]
eval_sequences = 8
eval_every_rounds = 2
[inner]
batch_size = 4
lr = 1e-2
[outer]
inner_steps = 10
optimizer = "average"
[sync]
expected_islands = 2
"""
SCENARIO = """
run = "run.toml"
[link]
up_bps = 20e6
down_bps = 50e6
delay_s = 0.01
[[islands]]
name = "east"
[[islands]]
name = "west"
"""
KEYS = {
    "schema_version", "run_id", "seed", "spec_digest", "wall_s", "islands", "rounds", "loss",
    "baselines", "traffic", "utilisation", "digests_agree", "lost_rounds",
}  # fmt: skip


def write_scenario(folder: Path, tokens: int) -> Path:
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question " * 1_000)
    (folder / "run.toml").write_text(SPEC.format(tokens=tokens, text=text))
    (folder / "scenario.toml").write_text(SCENARIO)
    return folder / "scenario.toml"


def command(scenario: Path, *options: str) -> list[str]:
    folder = str(scenario.parent / "out")
    return [sys.executable, "-m", "atoll", "simulate", str(scenario), "--folder", folder, *options]


def processes_of(folder: Path) -> list[int]:
    """Every process that has this folder in its command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder / "out") in words + environment:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("simulate")
    scenario = write_scenario(folder, 2_560)
    done = subprocess.run(
        command(
            scenario,
            "--json",
            str(folder / "r.json"),
            "--html",
            str(folder / "r.html"),
            "--baselines",
        ),
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (folder / "r.html").read_text()
    assert "<script src" not in page
    assert "<link" not in page
    assert "tiny-" in page
    models = [
        (folder / "out" / name / "final.safetensors").read_bytes() for name in ("east", "west")
    ]
    assert models[0] == models[1]
    result: dict[str, Any] = json.loads((folder / "r.json").read_bytes())
    return result


def test_a_simulation_reports_every_key(report: dict[str, Any]) -> None:
    assert report.keys() >= KEYS
    assert report["schema_version"] == 1
    assert report["loss"]["curve"][0][0] == 0
    assert report["loss"]["curve"][-1] == [2_560, report["loss"]["final"]]
    assert report["loss"]["final"] < report["loss"]["initial"]


def test_every_round_has_one_digest_and_counts_all_tokens(report: dict[str, Any]) -> None:
    assert report["digests_agree"]
    assert report["lost_rounds"] == 0
    assert [r["round"] for r in report["rounds"]] == [1, 2]
    assert all(len(r["digest"]) == 64 and len(r["participants"]) == 2 for r in report["rounds"])
    assert [i["tokens"] for i in report["islands"]] == [1_280, 1_280]
    assert [i["inner_steps"] for i in report["islands"]] == [20, 20]


def test_traffic_is_what_the_islands_sent_against_an_all_reduce_at_every_step(
    report: dict[str, Any],
) -> None:
    traffic = report["traffic"]
    assert traffic["outer_bytes"] == sum(i["sent_bytes"] for i in report["islands"])
    parameters = 11_312
    assert traffic["data_parallel_bytes"] == 20 * 2 * (2 - 1) * parameters * 2
    assert traffic["outer_bytes"] > 2 * 2 * parameters  # two rounds, int8, both directions


def test_baselines_train_on_the_same_number_of_steps(report: dict[str, Any]) -> None:
    arms = report["baselines"]
    assert arms["data_parallel"]["curve"][-1][0] == 2_560
    assert arms["solo"]["curve"][-1][0] == 1_280


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A simulation that is training and would go on for an hour."""
    process = subprocess.Popen(
        command(write_scenario(tmp_path, 10**9)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert process.stdout is not None
    try:
        assert any("round 2" in line for line in process.stdout)
        assert len(processes_of(tmp_path)) >= 5
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_ctrl_c_ends_everything(long_run: subprocess.Popen[str], tmp_path: Path) -> None:
    long_run.send_signal(signal.SIGINT)
    long_run.communicate(timeout=20)
    assert long_run.returncode == 130
    assert processes_of(tmp_path) == []


def test_kill_9_of_the_simulator_leaves_no_process_behind(
    long_run: subprocess.Popen[str], tmp_path: Path
) -> None:
    long_run.kill()
    deadline_s = time.monotonic() + 20
    while processes_of(tmp_path) and time.monotonic() < deadline_s:
        threading.Event().wait(0.1)
    assert processes_of(tmp_path) == []
