"""A whole simulation: start state, cluster, live view, baselines when asked, report."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from rich.console import Console

from atoll.run_init import init_run
from atoll.simulator.baselines import run_baselines
from atoll.simulator.cluster import Cluster
from atoll.simulator.live import show_until_ended
from atoll.simulator.report import Facts, make_report, read_events
from atoll.simulator.report_page import write_page
from atoll.simulator.scenario import Scenario
from protocol.identity import KEY_BYTES
from protocol.messages import Start
from protocol.state_dir import write_atomically


@dataclass(frozen=True)
class Outputs:
    """Where results go; `folder` keeps state and logs (None = a temporary one, removed after a run that
    ended well)."""

    json: Path | None
    html: Path | None
    folder: Path | None
    cache: Path


async def simulate(
    scenario: Scenario, outputs: Outputs, console: Console, baselines: bool
) -> dict[str, Any]:
    """Runs the scenario to its end and returns the report. Raises AtollError if the run fails."""
    if outputs.folder is not None:
        outputs.folder.mkdir(parents=True, exist_ok=True)
        return await _simulate_in(outputs.folder, scenario, outputs, console, baselines)
    folder = Path(tempfile.mkdtemp(prefix="atoll-simulation-"))
    try:
        report = await _simulate_in(folder, scenario, outputs, console, baselines)
    except BaseException:
        if (folder / "coordinator.log").exists():
            console.print(f"logs and state are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return report


async def _simulate_in(
    folder: Path, scenario: Scenario, outputs: Outputs, console: Console, baselines: bool
) -> dict[str, Any]:
    console.print(f"making the start state of [b]{scenario.spec.name}[/b]")
    seed = f"owner of {scenario.spec.name} {scenario.spec.seed}".encode()
    secret = blake3(seed).digest(KEY_BYTES)
    start = init_run(folder / "run", scenario.spec_path, outputs.cache, secret)
    started_s = time.monotonic()
    console.print(f"starting a coordinator and {len(scenario.islands)} islands")
    async with Cluster(scenario, folder, outputs.cache) as cluster:
        await show_until_ended(cluster, console)
    wall_s = time.monotonic() - started_s
    arms = await run_baselines(scenario, cluster.run, outputs.cache, console) if baselines else None
    report = _report(scenario, cluster, start, wall_s, arms)
    _write(report, outputs)
    return report


def _report(
    scenario: Scenario, cluster: Cluster, start: Start, wall_s: float, arms: dict[str, Any] | None
) -> dict[str, Any]:
    facts = Facts(
        run_id=start.run_id,
        seed=scenario.spec.seed,
        spec_digest=start.spec_digest.hex(),
        parameters=sum(tensor.values for tensor in start.layout),
        wall_s=wall_s,
    )
    events = {
        island.name: read_events(cluster.state_of(island) / "events.jsonl")
        for island in scenario.islands
    }
    return make_report(facts, events, arms)


def _write(report: dict[str, Any], outputs: Outputs) -> None:
    if outputs.json is not None:
        write_atomically(outputs.json, json.dumps(report, indent=1).encode())
    if outputs.html is not None:
        write_page(outputs.html, report)
