"""Whole runs in virtual time: what is agreed, what survives, what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll.simulator.scenario import Link
from protocol.errors import NotAdmitted, TrainerFailed
from protocol.frames import FrameKind, decode_frame

Play = Callable[[Any, Any], None]
Spec = Callable[..., Any]


def roots_of(cluster: Any) -> dict[int, set[str]]:
    roots: dict[int, set[str]] = {}
    for island in cluster.islands.values():
        for event in island.events("commit"):
            roots.setdefault(event["round"], set()).add(event["new_root"])
    return roots


async def lose_a_planned_contribution(cluster: Any, name: str) -> None:
    """Kills an island once a plan names its contribution, and starts it again."""
    island = cluster.islands[name]
    while island.daemon is None or not island.events("planned"):
        await asyncio.sleep(0.01)
    await island.crash()
    await asyncio.sleep(2)
    island.start()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_four_islands_hold_the_same_root_after_every_round(
    play: Play, spec_with: Spec, codec: str
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", "c", "d", link=Link(up_bps=1e6, down_bps=2e6, delay_s=0.05))
        await cluster.finished()
        roots = roots_of(cluster)
        assert sorted(roots) == [1, 2]
        assert all(len(found) == 1 for found in roots.values())
        assert all(len(i.events("commit")) == 2 for i in cluster.islands.values())

    outer = {"codec": codec, "optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
    play(spec_with(outer=outer, sync={"expected_islands": 4}), story)


def test_averaging_moves_the_anchor_to_the_mean_of_the_local_parameters(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b")
        await cluster.reached(1)
        anchor = cluster.islands["a"].state.replica.anchor(0)
        start = np.concatenate(
            [np.sin(np.arange(n, dtype=np.float32) + i) for i, n in ((0, 12_000), (3, 6_000))]
        )
        kept = 0.9**5
        expected = kept * start + (1 - kept) * 0.5  # targets 0 and 1, five steps of 0.1 each
        np.testing.assert_allclose(anchor[:18_000], expected, atol=1e-5)

    play(spec_with(outer={"optimizer": "average"}), story)


def test_the_chain_is_the_same_everywhere_and_ends_with_finish(play: Play, spec_with: Spec) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", "c")
        await cluster.finished()
        chains = [i.state.chain for i in cluster.islands.values()] + [cluster.coordinator.chain]
        assert len({tuple(c.record for c in chain.records) for chain in chains}) == 1
        assert all(chain.finished for chain in chains)
        assert chains[0].committed_tokens >= cluster.spec.target_tokens
        models = [i.site.final_model.read_bytes() for i in cluster.islands.values()]
        assert len(set(models)) == 1

    play(spec_with(sync={"expected_islands": 3}), story)


def test_two_fragments_take_turns_and_every_value_is_synchronised(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b")
        await cluster.finished()
        commits = cluster.islands["a"].events("commit")
        assert [e["fragment"] for e in commits[:4]] == [1, 0, 1, 0]
        assert all(len(found) == 1 for found in roots_of(cluster).values())

    play(spec_with(outer={"fragments": 2, "inner_steps": 6}), story)


def test_one_island_alone_commits_by_itself(play: Play, spec_with: Spec) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a")
        await cluster.finished()
        assert len(cluster.islands["a"].events("commit")) == 8

    play(spec_with(sync={"expected_islands": 1}), story)


def test_a_coordinator_killed_in_mid_run_goes_on_from_its_log(play: Play, spec_with: Spec) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", "c")
        await cluster.reached(1)
        await cluster.crash_coordinator()
        await asyncio.sleep(5)
        await cluster.start_coordinator()
        await cluster.finished()
        assert all(len(found) == 1 for found in roots_of(cluster).values())
        assert cluster.coordinator.term.counter == 2

    play(spec_with(sync={"expected_islands": 3}), story)


def test_a_plan_outlives_the_coordinator_that_made_it(play: Play, spec_with: Spec) -> None:
    """The round that was planned is committed under the next term with the same contributions."""

    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", link=Link(up_bps=1e5, down_bps=1e5, delay_s=0.05))
        while not cluster.islands["a"].daemon or not cluster.islands["a"].events("planned"):
            await asyncio.sleep(0.01)
        await cluster.crash_coordinator()
        await asyncio.sleep(3)
        await cluster.start_coordinator()
        await cluster.finished()
        planned = [e["round"] for e in cluster.islands["a"].events("planned")]
        assert planned[:2] == [1, 1]
        assert cluster.islands["a"].trainer.refs[0] == "snapshot"
        assert cluster.islands["a"].events("commit")[0]["round"] == 1

    play(spec_with(), story)


def test_an_island_killed_after_a_commit_comes_back_with_the_same_state(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", "c")
        await cluster.reached(2)
        island = cluster.islands["b"]
        await island.crash()
        await asyncio.sleep(1)
        island.start()
        await cluster.finished()
        assert all(len(found) == 1 for found in roots_of(cluster).values())
        assert len({i.state.replica.root(0) for i in cluster.islands.values()}) == 1

    play(spec_with(target_tokens=9_000, sync={"expected_islands": 3}), story)


def test_contributions_lost_in_a_crash_void_the_round_and_the_others_work_is_carried_over(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", "c", link=Link(up_bps=2e5, down_bps=2e5, delay_s=0.05))
        await lose_a_planned_contribution(cluster, "c")
        await cluster.finished()
        assert [e["round"] for e in cluster.islands["a"].events("void")] == [1]
        assert all(len(found) == 1 for found in roots_of(cluster).values())
        assert cluster.islands["a"].trainer.refs[0] == "snapshot"

    play(spec_with(sync={"expected_islands": 3}), story)


def test_with_a_smaller_quorum_the_others_commit_without_the_lost_contribution(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", "c", link=Link(up_bps=2e5, down_bps=2e5, delay_s=0.05))
        await lose_a_planned_contribution(cluster, "c")
        await cluster.finished()
        first = cluster.islands["a"].events("commit")[0]
        assert first["round"] == 1
        assert len(first["participants"]) == 2

    play(spec_with(sync={"expected_islands": 3, "quorum": 2}), story)


def test_a_straggler_is_left_out_and_its_work_is_carried_into_the_next_round(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", "slow")
        cluster.islands["slow"].trainer.step_s = 0.5
        await cluster.finished()
        slow = cluster.islands["slow"]
        assert "anchor" in slow.trainer.refs
        assert "reset" not in slow.trainer.refs
        assert any(e["listed"] for e in slow.events("commit"))
        assert all(len(found) == 1 for found in roots_of(cluster).values())

    play(spec_with(target_tokens=8_000, sync={"expected_islands": 3, "quorum": 2}), story)


def test_a_late_island_that_may_not_carry_starts_again_from_the_anchor(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", "slow")
        cluster.islands["slow"].trainer.step_s = 0.5
        await cluster.finished()
        assert "reset" in cluster.islands["slow"].trainer.refs
        assert "anchor" not in cluster.islands["slow"].trainer.refs

    sync = {"expected_islands": 3, "quorum": 2, "late": "drop"}
    play(spec_with(target_tokens=8_000, sync=sync), story)


def test_a_restarted_trainer_takes_the_anchor_and_counts_nothing_twice(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b")
        await cluster.reached(1)
        await asyncio.sleep(0.25)
        cluster.islands["b"].trainer.restart.set()
        await cluster.finished()
        assert all(len(found) == 1 for found in roots_of(cluster).values())
        trained = sum(e["tokens"] for e in cluster.islands["b"].events("boundary")[-1:])
        assert trained <= cluster.spec.target_tokens

    play(spec_with(), story)


def test_a_node_with_a_taken_name_is_told_which_option_to_change(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b")
        await cluster.reached(1)
        island_type = type(cluster.islands["a"])
        other = island_type(cluster, "stranger", Link(), 0.0, 0.1)
        other.start()
        assert other.task is not None
        with pytest.raises(NotAdmitted, match="already under way with"):
            await other.task

    play(spec_with(), story)


def test_no_message_is_larger_than_a_chunk_whatever_the_model(
    play: Play, spec_with: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    kinds: set[FrameKind] = set()

    def seen(data: bytes) -> Any:
        sizes.append(len(data))
        frame = decode_frame(data)
        kinds.add(frame.kind)
        return frame

    monkeypatch.setattr("node.peer_links.decode_frame", seen)

    async def story(cluster: Any) -> None:
        await cluster.start("a", "b")
        await cluster.reached(1)
        assert kinds >= {FrameKind.CELLS, FrameKind.REDUCED, FrameKind.LEAVES, FrameKind.CREDIT}
        assert max(sizes) <= (1 << 20) + 48

    play(spec_with(), story)


def test_the_run_ends_only_when_the_slowest_has_the_last_round_too(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", "c")
        cluster.islands["c"].link = Link(up_bps=1e6, down_bps=2e4, delay_s=0.5)
        await cluster.finished()
        models = [i.site.final_model.read_bytes() for i in cluster.islands.values()]
        assert len(set(models)) == 1

    play(spec_with(sync={"expected_islands": 3}, target_tokens=1_500), story)


def test_a_void_sends_a_trainer_on_to_the_next_rounds_fragment(play: Play, spec_with: Spec) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", "c", link=Link(up_bps=2e5, down_bps=2e5, delay_s=0.05))
        await lose_a_planned_contribution(cluster, "c")
        await cluster.finished()
        assert [e["round"] for e in cluster.islands["a"].events("void")] == [1]
        commits = cluster.islands["a"].events("commit")
        assert [(e["round"], e["fragment"]) for e in commits[:2]] == [(2, 0), (3, 1)]
        assert all(len(found) == 1 for found in roots_of(cluster).values())

    sync = {"expected_islands": 3}
    play(spec_with(outer={"fragments": 2, "inner_steps": 6}, sync=sync), story)


def test_with_two_fragments_a_token_counts_once(play: Play, spec_with: Spec) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b")
        await cluster.finished()
        trained = sum(i.events("boundary")[-1]["tokens"] for i in cluster.islands.values())
        assert cluster.spec.target_tokens <= trained <= cluster.spec.target_tokens + 900

    play(spec_with(outer={"fragments": 2, "inner_steps": 6}), story)


def test_training_that_diverges_ends_the_node_with_one_clear_line(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b")
        cluster.islands["b"].trainer.pull = float("nan")
        with pytest.raises(TrainerFailed, match=r"diverged.*inner\.lr"):
            await cluster.islands["b"].task

    play(spec_with(), story)


def test_an_island_that_was_away_for_rounds_fetches_the_updates_it_lacks(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", "c")
        await cluster.reached(1)
        island = cluster.islands["c"]
        await island.crash()
        island.task = None
        await cluster.reached(4)
        island.start()
        await cluster.finished()
        assert [e["round"] for e in island.events("repaired")] == [2, 3, 4]
        assert all(len(found) == 1 for found in roots_of(cluster).values())

    play(spec_with(target_tokens=20_000, sync={"expected_islands": 3, "quorum": 2}), story)


def test_an_island_that_lost_its_stored_updates_fetches_them_again(
    play: Play, spec_with: Spec
) -> None:
    async def story(cluster: Any) -> None:
        await cluster.start("a", "b", "c")
        await cluster.reached(2)
        island = cluster.islands["c"]
        await island.crash()
        for file in (island.site.state / "updates").glob("*.cells"):
            file.unlink()
        island.start()
        await cluster.finished()
        assert len({i.state.replica.root(0) for i in cluster.islands.values()}) == 1

    play(spec_with(target_tokens=9_000, sync={"expected_islands": 3, "quorum": 2}), story)


def test_an_island_that_lost_its_place_in_the_lobby_takes_it_again(
    play: Play, spec_with: Spec
) -> None:
    """Frozen for longer than the lease, with its stream alive."""

    async def story(cluster: Any) -> None:
        await cluster.start("a")
        await asyncio.sleep(5)
        present = cluster.coordinator._membership.present
        (island,) = present
        present[island] = replace(present[island], heard_s=-100.0)
        await asyncio.sleep(60)
        assert list(present) == [island]

    play(spec_with(), story)
