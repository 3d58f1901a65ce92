"""The desk between rounds and trainer: what a waiting trainer is told, and when. Real state, no process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.edge_messages import Apply, Boundary, GoOn, Hello, Message, Refused, Welcome
from node.journal import Journal
from node.run_state import RunState
from node.shared_buffer import SharedBuffer
from node.site import Site
from node.trainer_desk import TrainerDesk
from protocol.chain import genesis_record, record_for
from protocol.identity import Identity
from protocol.layout import TensorLayout
from protocol.merkle import digest
from protocol.messages import (
    Ballot,
    Certificate,
    ClosedRecord,
    Genesis,
    Member,
    Participant,
    Plan,
    Record,
    Report,
    SlotKind,
    Start,
    Term,
)
from protocol.spec import RunSpec
from protocol.wire import (
    encode_certificate,
    encode_genesis,
    encode_plan,
    encode_record,
    encode_report,
    encode_start,
    plan_id,
)

RUN = "run-1"
OWNER, ME = Identity(b"owner".ljust(32, b".")), Identity(b"me".ljust(32, b"."))
STEPS, STEP_TOKENS = 6, 100  # per turn of all fragments; per step
TENSORS = tuple(TensorLayout(name, (5_000,), "float32") for name in "abc")
LIFE = "life-1"


class Link:
    """Takes what the desk sends."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.descriptors: Sequence[int] = ()

    def turn_to(self, incarnation: str) -> None:
        pass

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        self.sent.append(message)
        self.descriptors = descriptors or self.descriptors

    def take(self) -> list[Message]:
        sent, self.sent = self.sent, []
        return sent


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


class World:
    """One island, alone in its view, so that its own vote certifies every record."""

    def __init__(self, folder: Path, fragments: int) -> None:
        spec = RunSpec.model_validate(
            {
                "name": "run",
                "target_tokens": 1_000_000,
                "data": {"text": ["unused"]},
                "outer": {
                    "fragments": fragments,
                    "codec": "fp32",
                    "inner_steps": STEPS,
                    "optimizer": "average",
                },
                "sync": {"expected_islands": 1, "cell_values": 4_096},
            }
        )
        roots = tuple(digest(bytes([number])) for number in range(fragments))
        start = Start(RUN, spec.digest(), TENSORS, roots, b"")
        site = Site("me", "nobody:1", folder, folder)
        self.journal, self.link, self.notes = Journal(site.journal), Link(), list[str]()
        self.state = RunState(site, spec, start, OWNER.island, self.journal)
        content = Genesis(OWNER.sign("start", encode_start(start)), (Member(ME.island, "me"),))
        genesis = genesis_record(RUN, OWNER.sign("genesis", encode_genesis(content)))
        self.state.append(ClosedRecord(encode_record(genesis), b""))
        self.desk = TrainerDesk(
            self.state,
            ME.island,
            self.link,  # type: ignore[arg-type]
            inline,
            lambda name, **_: self.notes.append(name),
        )
        self.steps = 0

    async def greet(self, life: str = LIFE) -> Welcome:
        assert await self.desk.greet(Hello(life, 1, TENSORS)) is None
        *_, welcome = self.link.take()
        assert isinstance(welcome, Welcome)
        return welcome

    async def arrive(self, fragment: int, steps: int, life: str = LIFE) -> Boundary:
        """The trainer has taken `steps` more steps and waits."""
        self.steps += steps
        totals = (self.steps, self.steps * STEP_TOKENS, self.steps)
        boundary = Boundary(self.steps, life, fragment, *totals, 1.0, 0.0, 0.0)
        await self.desk.arrive(boundary)
        return boundary

    async def commit(self) -> Record:
        """The next round, with this island's contribution alone; told to the desk."""
        made = await self.desk.contribution()
        assert made is not None
        slot = self.state.chain.head_slot + 1
        mine = Participant(ME.island, made.root, 1.0, made.tokens, made.steps)
        record = self.close(SlotKind.COMMIT, self.state.stage(slot, made.cells), (mine,))
        self.state.swap(record)
        await self.desk.applied(record)
        return record

    async def void(self) -> None:
        self.close(SlotKind.VOID)
        await self.desk.skipped()

    def close(
        self,
        kind: SlotKind,
        outcome: tuple[bytes, bytes] = (b"", b""),
        participants: tuple[Participant, ...] = (),
    ) -> Record:
        chain = self.state.chain
        slot = chain.head_slot + 1
        base = chain.bases[chain.fragment_of(slot)]
        plan = Plan(
            run_id=RUN,
            ballot=Ballot(Term(1, b"boot"), 1),
            slot=slot,
            kind=kind,
            view_slot=0,
            base_round=base.round,
            base_root=base.root,
            revision=0,
            participants=participants,
            parts=(),
            residual_digest=b"",
            budget_s=1.0,
        )
        data = encode_plan(plan)
        report = Report(RUN, plan.ballot, slot, plan_id(data), base.root, *outcome, 0)
        record = record_for(plan, outcome, chain.head_hash, chain)
        certificate = Certificate(data, (ME.sign("report", encode_report(report)),))
        self.state.append(ClosedRecord(encode_record(record), encode_certificate(certificate)))
        return record


Story = Callable[[World], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[int, Story], None]:
    def run(fragments: int, story: Story) -> None:
        world = World(tmp_path, fragments)
        try:
            asyncio.run(story(world))
        finally:
            world.desk.close()
            world.journal.close()

    return run


Play = Callable[[int, Story], None]

# --- after a void ------------------------------------------------------------------------------


@pytest.mark.parametrize("fragments", [2, 3])
def test_after_a_void_who_waits_for_another_fragment_goes_on_at_once_without_a_step(
    play: Play, fragments: int
) -> None:
    async def story(world: World) -> None:
        welcome = await world.greet()
        assert (welcome.next_fragment, welcome.next_edge_step) == (1, STEPS // fragments)
        boundary = await world.arrive(1, welcome.next_edge_step)
        assert world.link.take() == []
        await world.void()
        next_fragment = 2 % fragments
        assert world.link.take() == [GoOn(boundary.sequence, boundary.step, next_fragment)]
        assert world.desk.waiting is None
        await world.arrive(next_fragment, 0)
        assert world.link.take() == [], "it is the fragment of the open round: wait"
        await world.commit()
        (applied,) = world.link.take()
        assert isinstance(applied, Apply)
        assert (applied.fragment, applied.ref) == (next_fragment, "snapshot")

    play(fragments, story)


def test_after_a_void_of_the_only_fragment_the_trainer_waits_on_for_the_next_round(
    play: Play,
) -> None:
    async def story(world: World) -> None:
        await world.greet()
        boundary = await world.arrive(0, STEPS)
        first = await world.desk.contribution()
        await world.void()
        assert world.link.take() == []
        assert world.desk.waiting == boundary
        again = await world.desk.contribution()
        assert first is not None
        assert again is not None
        assert (again.root, again.tokens, again.steps) == (first.root, first.tokens, first.steps)

    play(1, story)


def test_a_void_while_the_trainer_is_under_way_sends_nothing(play: Play) -> None:
    async def story(world: World) -> None:
        await world.greet()
        await world.void()
        assert world.link.take() == []
        await world.arrive(1, STEPS // 2)
        (answer,) = world.link.take()
        assert isinstance(answer, GoOn)
        assert answer.next_fragment == 0

    play(2, story)


def test_who_waits_for_the_very_fragment_that_is_next_is_left_waiting(play: Play) -> None:
    async def story(world: World) -> None:
        await world.greet()
        world.close(SlotKind.VOID)
        boundary = await world.arrive(0, STEPS // 2)
        await world.desk.skipped()
        assert world.link.take() == []
        assert world.desk.waiting == boundary

    play(2, story)


def test_work_of_a_voided_round_is_offered_when_its_fragment_is_next_again(play: Play) -> None:
    async def story(world: World) -> None:
        await world.greet()
        await world.arrive(1, STEPS // 2)
        await world.void()
        await world.arrive(0, 0)
        await world.commit()
        (applied,) = (m for m in world.link.take() if isinstance(m, Apply))
        assert applied.next_fragment == 1
        await world.arrive(1, applied.next_edge_step - world.steps)
        made = await world.desk.contribution()
        assert made is not None
        assert (made.steps, made.tokens) == (STEPS, STEPS * STEP_TOKENS)
        assert world.notes == []

    play(2, story)


# --- what is counted ---------------------------------------------------------------------------


@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_a_new_trainer_begins_where_the_fragments_of_the_anchor_are_on_average(
    play: Play, fragments: int
) -> None:
    async def story(world: World) -> None:
        await world.greet()
        for _ in range(2 * fragments):
            await world.arrive(
                world.state.fragment_of(world.state.chain.head_slot + 1), STEPS // fragments
            )
            await world.commit()
        first, listed = world.state.chain.steps_of(ME.island), 0
        for slot in range(1, 2 * fragments + 1):
            commit = world.state.record(slot).commit
            assert commit is not None
            listed += commit.participants[0].steps
        assert first == listed // fragments
        assert world.state.chain.committed_tokens == listed * STEP_TOKENS // fragments
        welcome = await world.greet("life-2")
        assert welcome.first_step == first
        assert welcome.next_edge_step == first + STEPS // fragments
        assert welcome.committed_tokens == world.state.chain.committed_tokens

    play(fragments, story)


def test_no_step_is_listed_twice_for_one_fragment(play: Play) -> None:
    async def story(world: World) -> None:
        await world.greet()
        listed = {0: 0, 1: 0}
        for turn in range(6):
            fragment = world.state.fragment_of(world.state.chain.head_slot + 1)
            await world.arrive(fragment, STEPS // 2)
            if turn == 2:
                await world.void()
                continue
            commit = (await world.commit()).commit
            assert commit is not None
            listed[fragment] += commit.participants[0].steps
            assert listed[fragment] == world.steps

    play(2, story)


# --- greeting ----------------------------------------------------------------------------------


def test_a_trainer_with_another_model_is_refused_and_told_the_parameter(play: Play) -> None:
    async def story(world: World) -> None:
        other = (*TENSORS[:2], TensorLayout("c", (5_001,), "float32"))
        reason = await world.desk.greet(Hello(LIFE, 1, other))
        assert reason is not None
        assert "parameter 2: this model has c [5001] float32" in reason
        assert world.link.take() == [Refused(reason)]

    play(1, story)


def test_the_trainers_snapshot_is_the_contribution_and_the_commit_becomes_its_anchor(
    play: Play,
) -> None:
    async def story(world: World) -> None:
        await world.greet()
        values = sum(tensor.values for tensor in TENSORS)
        snapshot, old, new = (
            SharedBuffer.open(os.dup(fd), values) for fd in world.link.descriptors
        )
        np.copyto(snapshot.values, np.float32(2.0))
        await world.arrive(0, STEPS)
        await world.commit()
        (applied,) = world.link.take()
        assert isinstance(applied, Apply)
        assert (applied.ref, applied.anchor_slot) == ("snapshot", 1)
        assert not old.values.any(), "the slot that was handed over before stays as it is"
        assert (new.values == 2.0).all()
        for buffer in (snapshot, old, new):
            buffer.close()

    play(1, story)
