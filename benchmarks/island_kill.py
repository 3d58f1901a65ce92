"""kill -9 of one rank of a four-rank island in mid-run: how long until it trains and counts again?

    python -P benchmarks/island_kill.py [--json FILE]

Three islands of examples/mixed_islands (2 x 2, pipeline 2, alone) with a quorum of two, so that nobody has
to wait for the wounded one longer than the grace period. The same run without the kill gives the loss to
compare with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from atoll.cli import cache_directory
from atoll.run_init import init_run
from atoll.simulator.cluster import Cluster
from atoll.simulator.live import show_until_ended
from atoll.simulator.report import Facts, make_report, read_events
from atoll.simulator.scenario import Scenario, load_scenario

EXAMPLE = Path(__file__).parent.parent / "examples" / "mixed_islands"
GRACE_S = 5.0
KILL_AFTER_ROUND = 4
VICTIM, RANK = "grid", 2

Events = dict[str, list[dict[str, Any]]]


def scenario_with_quorum(folder: Path) -> Scenario:
    """The example, but a round needs two of the three islands."""
    spec = (EXAMPLE / "run.toml").read_text() + f"quorum = 2\ngrace_s = {GRACE_S}\n"
    (folder / "run.toml").write_text(spec)
    (folder / "scenario.toml").write_text((EXAMPLE / "scenario.toml").read_text())
    return load_scenario(folder / "scenario.toml")


def rank_pid(socket: Path, rank: int) -> int:
    """The process of that island's trainer whose RANK it is."""
    wanted = {f"ATOLL_SOCKET={socket}".encode(), f"RANK={rank}".encode()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                variables = set((entry / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue
            if wanted <= variables:
                return int(entry.name)
    raise SystemExit(f"no rank {rank} behind {socket}")


async def kill_in_mid_run(cluster: Cluster) -> None:
    state = cluster.folder / VICTIM
    while True:
        commits = [e for e in read_events(state / "events.jsonl") if e["event"] == "commit"]
        if len(commits) >= KILL_AFTER_ROUND:
            break
        await asyncio.sleep(0.05)
    os.kill(rank_pid(state / "trainer.sock", RANK), signal.SIGKILL)


async def run(scenario: Scenario, folder: Path, kill: bool, console: Console) -> tuple[Events, Any]:
    start = init_run(folder / "run", scenario.spec_path, cache_directory())
    async with Cluster(scenario, folder, cache_directory()) as cluster:
        killing = asyncio.create_task(kill_in_mid_run(cluster)) if kill else None
        await show_until_ended(cluster, console)
        if killing is not None:
            await killing
    events = {i.name: read_events(folder / i.name / "events.jsonl") for i in scenario.islands}
    facts = Facts(start.run_id, scenario.spec.seed, start.spec_digest.hex(), 0, 0.0)
    return events, make_report(facts, events, None)


def measure(events: Events, report: Any, undisturbed: Any) -> dict[str, Any]:
    mine = events[VICTIM]
    lost = next(e for e in mine if e["event"] == "trainer_lost")
    back = next(e for e in mine if e["event"] == "trainer" and e["at_s"] > lost["at_s"])
    commits = [e for e in mine if e["event"] == "commit"]
    opened_after = next(
        (
            e
            for before, e in zip(commits, commits[1:], strict=False)
            if before["at_s"] > back["at_s"]
        ),
        None,
    )
    waits = {name: _longest_wait_s(es) for name, es in events.items() if name != VICTIM}
    return {
        "back_s": round(back["at_s"] - lost["at_s"], 2),
        "counts_in_first_round_opened_after": bool(opened_after and opened_after["listed"]),
        "rounds_without_it": sum(not e["listed"] for e in commits),
        "longest_wait_of_others_s": waits,
        "grace_s": GRACE_S,
        "final_loss": report["loss"]["final"],
        "final_loss_undisturbed": undisturbed["loss"]["final"],
        "ratio": round(report["loss"]["final"] / undisturbed["loss"]["final"], 4),
        "digests_agree": report["digests_agree"],
    }


def _longest_wait_s(events: list[dict[str, Any]]) -> float:
    waits = [e["wait_s"] for e in events if e["event"] == "boundary"]
    return round(max((b - a for a, b in zip(waits, waits[1:], strict=False)), default=0.0), 2)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="keep states and logs here")
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="atoll-kill-") as name:
        folder = arguments.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        scenario = scenario_with_quorum(folder)
        results = []
        for kill in (False, True):
            place = folder / ("killed" if kill else "undisturbed")
            place.mkdir()
            results.append(await run(scenario, place, kill, console))
    measured = measure(*results[1], results[0][1])
    console.print_json(data=measured)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
