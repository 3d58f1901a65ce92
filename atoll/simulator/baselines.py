"""The two arms one compares with, on the same tokens, seed and start state: every step averaged, and alone.

Each arm gets its own small sweep of learning rates and shows its best; two processes at a time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from atoll.simulator.scenario import Scenario
from node.settings import Place, settings_for
from protocol.errors import RunFailed
from protocol.run_files import RunDirectory
from protocol.state_dir import write_atomically

ARMS = ("data_parallel", "solo")
_AT_ONCE = 2


@dataclass(frozen=True)
class _Job:
    arm: str
    lr: float


async def run_baselines(
    scenario: Scenario, run: RunDirectory, cache: Path, console: Console
) -> dict[str, Any]:
    """Best result of each arm: {"lr", "final", "curve", "tried": {lr: final}}."""
    settings = run.path / "baseline.json"
    spec = scenario.spec
    place = Place(cache, run.tokenizer)
    made = settings_for(spec, spec.sync.expected_islands, place, str(scenario.spec_path))
    write_atomically(settings, made.model_dump_json().encode())
    jobs = [_Job(arm, lr) for arm in ARMS for lr in scenario.baseline_lrs]
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(job: _Job) -> dict[str, Any]:
        async with gate:
            console.print(f"training {job.arm.replace('_', ' ')} with lr {job.lr:g}")
            result = await _train(job, settings, run)
            console.print(f"  {job.arm.replace('_', ' ')}, lr {job.lr:g}: {result['final']:.4f}")
            return result

    tasks = [asyncio.create_task(one(job)) for job in jobs]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {arm: _best([r for r in results if r["arm"] == arm]) for arm in ARMS}


def _best(results: list[dict[str, Any]]) -> dict[str, Any]:
    best = min(results, key=lambda r: r["final"])
    tried = {str(r["lr"]): r["final"] for r in results}
    return {"final": best["final"], "curve": best["curve"], "lr": best["lr"], "tried": tried}


async def _train(job: _Job, settings: Path, run: RunDirectory) -> dict[str, Any]:
    out = run.path / f"{job.arm}-{job.lr:g}.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "node.launcher", sys.executable, "-P", "-m", "node.baseline"),
        *(job.arm, str(settings), str(out), "--start", str(run.start_state), "--lr", str(job.lr)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode:
        last = (said.decode(errors="replace").strip() or "no output").splitlines()[-1]
        raise RunFailed(
            f"{job.arm} with lr {job.lr:g} ended with code {process.returncode}: {last}"
        )
    result: dict[str, Any] = json.loads(out.read_bytes())
    return result
