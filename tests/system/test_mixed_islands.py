"""Three islands of different shapes in one run, as real processes; one rank of the largest is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from atoll.run_init import init_run
from atoll.simulator.cluster import Cluster
from atoll.simulator.report import Facts, make_report, read_events
from atoll.simulator.scenario import load_scenario

ROUNDS, KILLED_AFTER_ROUND = 5, 2
SPEC = f"""
name = "mixed"
target_tokens = {ROUNDS * 3 * 4 * 4 * 32}
[model]
width = 32
depth = 2
heads = 2
context = 32
[data]
text = ["{{stdlib}}/json/*.py"]
eval_sequences = 8
[inner]
batch_size = 4
[outer]
inner_steps = 4
codec = "fp32"
[sync]
expected_islands = 3
"""
SCENARIO = """
[[islands]]
name = "grid"
mesh = { shard = 2, tensor = 2 }
checkpoint_rounds = 1
[[islands]]
name = "pipeline"
mesh = { pipeline = 2 }
[[islands]]
name = "alone"
"""


def rank_pid(socket: Path, rank: int) -> int:
    wanted = {f"ATOLL_SOCKET={socket}".encode(), f"RANK={rank}".encode()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                variables = set((entry / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue
            if wanted <= variables:
                return int(entry.name)
    raise AssertionError(f"no rank {rank} behind {socket}")


class Story:
    """What the run has left behind."""

    def __init__(self, folder: Path) -> None:
        (folder / "run.toml").write_text(SPEC)
        (folder / "scenario.toml").write_text(SCENARIO)
        self._scenario = load_scenario(folder / "scenario.toml")
        self.folder = folder
        start = init_run(folder / "run", self._scenario.spec_path, folder / "cache")
        asyncio.run(self._live())
        self.events = {
            name: read_events(folder / name / "events.jsonl")
            for name in ("grid", "pipeline", "alone")
        }
        facts = Facts(start.run_id, 0, start.spec_digest.hex(), 0, 0.0)
        self.report = make_report(facts, self.events, None)

    async def _live(self) -> None:
        async with Cluster(self._scenario, self.folder, self.folder / "cache") as cluster:
            await self._until(cluster, lambda: len(self._commits()) >= KILLED_AFTER_ROUND)
            os.kill(rank_pid(self.folder / "grid" / "trainer.sock", 2), signal.SIGKILL)
            await self._until(cluster, lambda: cluster.islands_ended)

    async def _until(self, cluster: Cluster, condition: Any) -> None:
        while not condition():
            cluster.raise_if_failed()
            await asyncio.sleep(0.05)
        cluster.raise_if_failed()

    def _commits(self) -> list[dict[str, Any]]:
        events = read_events(self.folder / "grid" / "events.jsonl")
        return [event for event in events if event["event"] == "commit"]

    def final_model(self, name: str) -> dict[str, Any]:
        return load_file(self.folder / name / "final.safetensors")

    def log(self, name: str) -> str:
        return (self.folder / name / "trainer.log").read_text()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(tmp_path_factory.mktemp("mixed"))


def test_every_round_has_one_digest_whatever_the_mesh(story: Story) -> None:
    assert story.report["digests_agree"]
    assert len(story.report["rounds"]) == ROUNDS
    assert {row["name"]: row["ranks"] for row in story.report["islands"]} == {
        "grid": 4,
        "pipeline": 2,
        "alone": 1,
    }


def test_all_islands_end_with_the_same_model(story: Story) -> None:
    grid, pipeline, alone = (story.final_model(n) for n in ("grid", "pipeline", "alone"))
    for name, values in alone.items():
        assert values.tobytes() == grid[name].tobytes() == pipeline[name].tobytes()


def test_an_island_that_loses_a_rank_comes_back_and_counts_in_every_round(story: Story) -> None:
    starts = {row["name"]: row["trainer_starts"] for row in story.report["islands"]}
    assert starts == {"grid": 2, "pipeline": 1, "alone": 1}
    assert all(len(row["participants"]) == 3 for row in story.report["rounds"])


def test_what_the_ranks_had_committed_is_not_trained_again(story: Story) -> None:
    """The new ranks go on from the steps that the chain has counted."""
    grid = next(row for row in story.report["islands"] if row["name"] == "grid")
    assert grid["inner_steps"] == ROUNDS * 4


def test_the_new_ranks_take_up_the_optimizers_state(story: Story) -> None:
    folder = sorted(path.name for path in (story.folder / "grid" / "inner").iterdir())
    assert folder == [f"step-{step:08d}" for step in (ROUNDS * 4 - 4, ROUNDS * 4)]
    assert story.log("grid").count("inner_checkpoint_taken_up") == 4
