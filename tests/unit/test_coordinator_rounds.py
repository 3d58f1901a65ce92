"""The proposer over a real chain, with real signatures: what is planned, what closes, what never does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds import (
    AliveChanged,
    CloseSlot,
    Effect,
    Event,
    GoneArrived,
    Proposer,
    ReadyArrived,
    Reject,
    ReportArrived,
    SendPlan,
    StorePlan,
    Tick,
)
from protocol.chain import Chain, genesis_record
from protocol.identity import Identity
from protocol.layout import TensorLayout, build_layout
from protocol.merkle import digest
from protocol.messages import (
    Ballot,
    ClosedRecord,
    Genesis,
    Member,
    Plan,
    Ready,
    Record,
    Report,
    SlotKind,
    Start,
    Term,
)
from protocol.spec import Sync
from protocol.wire import (
    decode_certificate,
    decode_plan,
    encode_genesis,
    encode_ready,
    encode_record,
    encode_report,
    encode_start,
    plan_id,
)

OWNER = Identity(b"owner".ljust(32, b"."))
ISLANDS = sorted(
    (Identity(name.encode().ljust(32, b".")) for name in "abcde"), key=lambda i: i.island
)
STRANGER = Identity(b"stranger".ljust(32, b"."))
TENSORS = (TensorLayout("w", (20_000,), "float32"),)
START_ROOT = digest(b"start")
TERM = Term(1, b"boot")
RUN = "run-1"


def unopened_chain(islands: int, durability: int | None = None) -> Chain:
    return Chain(
        RUN, OWNER.island, Sync(expected_islands=islands, durability=durability).durability_of
    )


def opened_chain(islands: int, durability: int | None = None) -> Chain:
    start = Start(RUN, digest(b"spec"), TENSORS, (START_ROOT,), b"")
    view = tuple(Member(i.island, f"island-{n}") for n, i in enumerate(ISLANDS[:islands]))
    genesis = Genesis(OWNER.sign("start", encode_start(start)), view)
    chain = unopened_chain(islands, durability)
    record = genesis_record(RUN, OWNER.sign("genesis", encode_genesis(genesis)))
    chain.append(ClosedRecord(encode_record(record), b""))
    return chain


@dataclass
class World:
    """A proposer whose effects are carried out: plans are stored, closed slots extend the chain."""

    islands: int = 3
    sync: Sync = field(default_factory=lambda: Sync(expected_islands=3, quorum=2, grace_s=10.0))
    target_tokens: int = 1_000_000
    now_s: float = 0.0
    stored: list[bytes] = field(default_factory=list)
    closed: list[ClosedRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chain = opened_chain(self.islands, self.sync.durability)
        self.start_proposer(TERM)

    def start_proposer(self, term: Term, *, promised: int | None = None) -> None:
        layout = build_layout(TENSORS, 1, 4_096, self.islands)
        self.proposer = Proposer(self.chain, layout, self.sync, self.target_tokens, term)
        self.promise(self.islands if promised is None else promised)

    def promise(self, count: int) -> list[Effect]:
        return self.alive(*range(self.islands), promised=count)

    def alive(self, *numbers: int, promised: int) -> list[Effect]:
        return self.do(AliveChanged(frozenset(ISLANDS[n].island for n in numbers), promised))

    def do(self, event: Event) -> list[Effect]:
        effects = self.proposer.step(event, self.now_s)
        for effect in effects:
            match effect:
                case StorePlan(_, _, plan_bytes):
                    self.stored.append(plan_bytes)
                case SendPlan(plan_bytes):
                    assert plan_bytes == self.stored[-1], "sent before it was stored"
                case CloseSlot(closed):
                    self.chain.append(closed)
                    self.closed.append(closed)
                    self.proposer.slot_closed()
        return effects

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        self.now_s += seconds
        return self.do(Tick())

    @property
    def plan_bytes(self) -> bytes:
        return self.proposer.current_plan()

    @property
    def plan(self) -> Plan:
        return decode_plan(self.plan_bytes)

    def ready(self, number: int, root: bytes = b"", tokens: int = 100) -> list[Effect]:
        return self.do(ready_of(ISLANDS[number], self.chain, root=root, tokens=tokens))

    def report(self, number: int, outcome: bytes = b"new") -> list[Effect]:
        return self.do(report_of(ISLANDS[number], self.plan_bytes, outcome))

    def gone(self, number: int) -> list[Effect]:
        participant = self.plan.participant(ISLANDS[number].island)
        assert participant is not None
        return self.do(GoneArrived(participant.island, self.plan.slot, participant.root))

    def commit(self) -> None:
        for number in range(self.islands):
            self.ready(number)
        for number in range(self.chain.durability):
            self.report(number)


def root_of(island: Identity, round_: int) -> bytes:
    return digest(island.island + bytes([round_]))


def ready_of(
    island: Identity, chain: Chain, *, root: bytes = b"", tokens: int = 100, **changed: Any
) -> ReadyArrived:
    round_ = chain.head_slot + 1
    ready = Ready(
        run_id=RUN,
        round=round_,
        base_round=chain.bases[0].round,
        base_root=chain.bases[0].root,
        revision=0,
        root=root or root_of(island, round_),
        tokens=tokens,
        steps=10,
        up_bps=1e6,
        squared_norms=(1.0,),
    )
    ready = replace(ready, **changed)
    return ReadyArrived(island.sign("ready", encode_ready(ready)), ready)


def report_of(
    island: Identity, plan_bytes: bytes, outcome: bytes = b"new", **changed: Any
) -> ReportArrived:
    plan = decode_plan(plan_bytes)
    commit = plan.kind is SlotKind.COMMIT
    report = Report(
        run_id=RUN,
        ballot=plan.ballot,
        slot=plan.slot,
        plan_id=plan_id(plan_bytes),
        base_root=plan.base_root,
        reduced_root=digest(b"sum" + repr(plan.pairs).encode()) if commit else b"",
        new_root=digest(outcome + repr(plan.pairs).encode()) if commit else b"",
        view_slot=plan.view_slot,
    )
    report = replace(report, **changed)
    return ReportArrived(island.sign("report", encode_report(report)), report)


def kinds(effects: list[Effect]) -> list[str]:
    return [type(e).__name__ for e in effects]


def rejection(effects: list[Effect]) -> str:
    (reject,) = effects
    assert isinstance(reject, Reject)
    return reject.reason


def last_record(world: World) -> Record:
    """The record a second chain, from genesis on, takes from the same bytes."""
    second = Chain(RUN, OWNER.island, world.sync.durability_of)
    records = [second.append(closed) for closed in world.chain.records]
    assert second.head_hash == world.chain.head_hash
    return records[-1]


PLANNED = ["StorePlan", "SendPlan"]

# --- the first plan ----------------------------------------------------------------------------


def test_a_plan_comes_after_quorum_and_then_grace() -> None:
    world = World()
    assert world.ready(0) == []
    assert world.tick(100.0) == []
    assert world.ready(1) == []
    assert world.tick(9.9) == []
    assert kinds(world.tick(0.1)) == PLANNED
    assert [p.island for p in world.plan.participants] == [i.island for i in ISLANDS[:2]]


def test_everyone_ready_is_planned_at_once() -> None:
    world = World()
    world.ready(2)
    world.ready(0)
    assert kinds(world.ready(1)) == PLANNED
    plan = world.plan
    assert (plan.slot, plan.kind, plan.ballot) == (1, SlotKind.COMMIT, Ballot(TERM, 1))
    assert (plan.base_round, plan.base_root, plan.view_slot) == (0, START_ROOT, 0)
    assert [p.island for p in plan.participants] == [i.island for i in ISLANDS[:3]]


def test_without_a_quorum_of_its_own_a_run_waits_for_everyone() -> None:
    world = World(sync=Sync(expected_islands=3, grace_s=0.0))
    world.ready(0)
    world.ready(1)
    assert world.tick(1e6) == []
    assert kinds(world.ready(2)) == PLANNED


def test_parts_tile_the_cells_among_the_participants() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    parts = world.plan.parts
    assert [p.first_cell for p in parts] == [0, *[p.stop_cell for p in parts[:-1]]]
    assert parts[-1].stop_cell == 5
    assert {p.owner for p in parts} <= {i.island for i in ISLANDS[:3]}


def test_weights_follow_tokens_and_sum_to_one() -> None:
    world = World()
    for number, tokens in enumerate((100, 100, 200)):
        world.ready(number, tokens=tokens)
    assert [p.weight for p in world.plan.participants] == [0.25, 0.25, 0.5]


def test_a_ready_replaced_before_the_plan_counts_in_its_newest_form() -> None:
    world = World()
    world.ready(0, root=b"a" * 32, tokens=100)
    world.ready(0, root=b"b" * 32, tokens=300)
    world.ready(1)
    world.ready(2)
    mine = world.plan.participant(ISLANDS[0].island)
    assert mine is not None
    assert (mine.root, mine.tokens) == (b"b" * 32, 300)


def test_a_ready_after_the_plan_changes_nothing_in_this_round() -> None:
    world = World()
    world.ready(0)
    world.ready(1)
    world.tick(0.0)
    world.tick(10.0)
    before = world.plan_bytes
    assert world.ready(0, root=b"b" * 32) == []
    assert world.ready(2) == []
    assert world.plan_bytes == before
    world.gone(1)
    assert world.plan.kind is SlotKind.VOID, "the late Ready must not fill the quorum"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"round": 2}, "round 2 is not open: the open one is 1"),
        ({"round": 0}, "round 0 is not open"),
        ({"base_round": 1}, "the base is not the committed one of round 0"),
        ({"base_root": b"x" * 32}, "catch up first"),
    ],
)
def test_a_ready_that_does_not_fit_is_rejected_with_the_reason(
    changed: dict[str, Any], reason: str
) -> None:
    world = World()
    effects = world.do(ready_of(ISLANDS[0], world.chain, **changed))
    assert reason in rejection(effects)


def test_a_ready_of_a_stranger_or_for_another_run_is_rejected() -> None:
    world = World()
    assert "not a member" in rejection(world.do(ready_of(STRANGER, world.chain)))
    other_run = ready_of(ISLANDS[0], world.chain, run_id="run-2")
    assert "not a member of this run" in rejection(world.do(other_run))


def test_what_comes_before_the_run_is_open_is_rejected_and_never_an_error() -> None:
    world = World()
    ready = ready_of(ISLANDS[0], world.chain, round=0)
    for number in range(3):
        world.ready(number)
    report = report_of(ISLANDS[0], world.plan_bytes)
    world.chain = unopened_chain(3)
    world.start_proposer(TERM)
    assert "not a member" in rejection(world.do(ready))
    assert "not the latest" in rejection(world.do(report))
    assert world.do(GoneArrived(ISLANDS[0].island, 0, root_of(ISLANDS[0], 1))) == []
    assert world.tick(1e6) == []


def test_a_ready_on_the_base_before_the_last_commit_is_rejected() -> None:
    world = World()
    old = world.chain.bases[0]
    world.commit()
    late = ready_of(ISLANDS[0], world.chain, base_round=old.round, base_root=old.root)
    assert "catch up first" in rejection(world.do(late))


# --- promises ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("islands", "durability", "needed"), [(3, None, 2), (5, None, 3), (5, 4, 2)]
)
def test_nothing_is_planned_before_n_minus_d_plus_one_members_promised(
    islands: int, durability: int | None, needed: int
) -> None:
    sync = Sync(expected_islands=islands, durability=durability, grace_s=0.0)
    world = World(islands, sync)
    world.start_proposer(TERM, promised=needed - 1)
    for number in range(islands):
        assert world.ready(number) == []
    assert kinds(world.promise(needed)) == PLANNED


def test_nothing_closes_while_too_few_have_promised() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    world.promise(1)
    assert world.report(0) == world.report(1) == []
    assert kinds(world.promise(2)) == ["CloseSlot"]


# --- closing -----------------------------------------------------------------------------------


def test_reports_below_durability_do_not_close() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    assert world.report(0) == []
    assert world.report(0) == [], "the same island twice is one vote"
    assert world.tick(1e6) == []
    assert world.chain.head_slot == 0


def test_matching_reports_close_with_a_certificate_that_others_accept() -> None:
    world = World()
    for number in range(3):
        world.ready(number, tokens=100 * (number + 1))
    plan_bytes = world.plan_bytes
    world.report(2)
    assert kinds(world.report(0)) == ["CloseSlot"]
    record = last_record(world)
    assert record.commit is not None
    assert (record.slot, record.commit.tokens) == (1, 600)
    assert record.commit.participants == decode_plan(plan_bytes).participants
    certificate = decode_certificate(world.chain.records[1].certificate)
    assert certificate.plan == plan_bytes
    assert {s.signer for s in certificate.reports} == {ISLANDS[0].island, ISLANDS[2].island}
    assert world.chain.bases[0].root == record.commit.new_root


def test_a_member_outside_the_plan_may_vote_on_it() -> None:
    world = World()
    world.ready(0)
    world.ready(1)
    world.tick(10.0)
    world.report(0)
    assert kinds(world.report(2)) == ["CloseSlot"]


def test_disagreeing_roots_close_when_enough_agree_and_only_these_stand_in_the_record() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    assert world.report(0, b"one") == []
    assert world.report(1, b"two") == []
    assert kinds(world.report(2, b"two")) == ["CloseSlot"]
    last_record(world)
    certificate = decode_certificate(world.chain.records[1].certificate)
    assert {s.signer for s in certificate.reports} == {i.island for i in ISLANDS[1:3]}


def test_an_island_that_corrects_itself_counts_once_with_its_last_report() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    world.report(0, b"one")
    world.report(0, b"two")
    assert world.report(1, b"one") == []
    assert kinds(world.report(2, b"two")) == ["CloseSlot"]


def test_reports_for_an_older_attempt_are_rejected() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    old = world.plan_bytes
    world.report(0)
    world.gone(2)
    assert world.plan.ballot.attempt == 2
    assert "not the latest" in rejection(world.do(report_of(ISLANDS[1], old)))
    assert world.report(1) == [], "the report for the older attempt must not count"
    assert kinds(world.report(0)) == ["CloseSlot"]


def test_reports_counted_for_an_older_attempt_are_forgotten_even_with_an_equal_outcome() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    equal = {"reduced_root": b"s" * 32, "new_root": b"n" * 32}
    world.do(report_of(ISLANDS[0], world.plan_bytes, **equal))
    world.gone(2)
    assert world.do(report_of(ISLANDS[1], world.plan_bytes, **equal)) == []
    assert kinds(world.do(report_of(ISLANDS[0], world.plan_bytes, **equal))) == ["CloseSlot"]


def test_a_report_of_a_stranger_is_rejected() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    stranger = report_of(STRANGER, world.plan_bytes)
    assert "a report of no member" in rejection(world.do(stranger))
    assert "not the latest" in rejection(World().do(stranger))


@pytest.mark.parametrize(
    "changed",
    [
        {"ballot": Ballot(Term(9, b"x"), 1)},
        {"ballot": Ballot(TERM, 2)},
        {"run_id": "run-2"},
        {"slot": 2},
        {"base_root": b"x" * 32},
        {"view_slot": 1},
        {"reduced_root": b""},
        {"new_root": b""},
        {"reduced_root": b"", "new_root": b""},
    ],
)
def test_a_report_that_is_not_on_exactly_the_plan_is_rejected_and_does_not_count(
    changed: dict[str, Any],
) -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    for number in range(3):
        odd = report_of(ISLANDS[number], world.plan_bytes, **changed)
        assert "not on what the plan says" in rejection(world.do(odd))
    assert world.report(0) == []
    assert kinds(world.report(1)) == ["CloseSlot"]


def test_a_report_with_roots_on_a_void_is_rejected() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    world.gone(0)
    world.gone(1)
    assert world.plan.kind is SlotKind.VOID
    roots = {"reduced_root": b"s" * 32, "new_root": b"n" * 32}
    odd = report_of(ISLANDS[0], world.plan_bytes, **roots)
    assert "not on what the plan says" in rejection(world.do(odd))
    world.report(0)
    assert kinds(world.report(1)) == ["CloseSlot"]


# --- lost contributions ------------------------------------------------------------------------


def test_a_lost_contribution_gives_a_new_plan_with_a_subset_and_new_weights() -> None:
    world = World()
    for number, tokens in enumerate((100, 300, 400)):
        world.ready(number, tokens=tokens)
    first = world.plan
    assert kinds(world.gone(2)) == PLANNED
    plan = world.plan
    assert plan.ballot == Ballot(TERM, 2)
    assert plan.pairs == first.pairs[:2]
    assert [p.weight for p in plan.participants] == [0.25, 0.75]
    assert {p.owner for p in plan.parts} <= {i.island for i in ISLANDS[:2]}
    world.report(0)
    world.report(1)
    record = last_record(world)
    assert record.commit is not None
    assert record.commit.tokens == 400


def test_a_contribution_lost_before_the_plan_is_left_out_of_what_closes() -> None:
    world = World()
    world.ready(0)
    world.do(GoneArrived(ISLANDS[0].island, 1, root_of(ISLANDS[0], 1)))
    world.ready(1)
    world.ready(2)
    world.tick()
    assert [p.island for p in world.plan.participants] == [i.island for i in ISLANDS[1:3]]


def test_an_unknown_root_or_another_round_gone_changes_nothing() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    assert world.do(GoneArrived(ISLANDS[0].island, 1, b"x" * 32)) == []
    assert world.do(GoneArrived(ISLANDS[0].island, 2, root_of(ISLANDS[0], 1))) == []
    assert world.plan.ballot.attempt == 1


@pytest.mark.parametrize("signer", [ISLANDS[1], STRANGER])
@pytest.mark.parametrize("planned", [True, False])
def test_nobody_can_say_that_the_contribution_of_another_is_gone(
    signer: Identity, planned: bool
) -> None:
    world = World()
    foreign = GoneArrived(signer.island, 1, root_of(ISLANDS[0], 1))
    if not planned:
        assert world.do(foreign) == []
    for number in range(3):
        world.ready(number)
    assert world.do(foreign) == []
    assert world.plan.ballot.attempt == 1
    assert len(world.plan.participants) == 3


def test_of_two_equal_contributions_only_the_one_whose_owner_lost_it_is_left_out() -> None:
    world = World()
    for number in range(3):
        world.ready(number, root=b"e" * 32)
    assert kinds(world.gone(1)) == PLANNED
    assert [p.island for p in world.plan.participants] == [ISLANDS[0].island, ISLANDS[2].island]


def test_fewer_than_quorum_left_voids_the_round() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    world.gone(0)
    assert kinds(world.gone(1)) == PLANNED
    plan = world.plan
    assert (plan.kind, plan.participants, plan.parts) == (SlotKind.VOID, (), ())
    base = world.chain.bases[0]
    world.report(0)
    assert kinds(world.report(1)) == ["CloseSlot"]
    assert last_record(world).kind is SlotKind.VOID
    assert world.chain.bases[0] == base
    assert world.chain.committed_tokens == 0


def test_spent_attempts_void_the_round() -> None:
    world = World(5, Sync(expected_islands=5, quorum=1, max_attempts=2))
    for number in range(5):
        world.ready(number)
    world.gone(0)
    assert world.plan.kind is SlotKind.COMMIT
    world.gone(1)
    assert (world.plan.kind, world.plan.ballot.attempt) == (SlotKind.VOID, 3)


def test_after_a_void_the_same_contribution_may_be_offered_to_the_next_round() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    world.gone(0)
    world.gone(1)
    world.report(0)
    world.report(1)
    for number in range(3):
        effects = world.ready(number, root=root_of(ISLANDS[number], 1))
    assert kinds(effects) == PLANNED
    assert (world.plan.slot, world.plan.base_round) == (2, 0)


# --- restart -----------------------------------------------------------------------------------


def test_a_resumed_plan_is_proposed_again_under_the_new_term_with_the_same_pairs() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    old = world.plan
    new_term = Term(2, b"again")
    world.start_proposer(new_term, promised=0)
    world.proposer.resume(old)
    assert world.tick(1e6) == []
    assert kinds(world.promise(2)) == PLANNED
    plan = world.plan
    assert plan.ballot == Ballot(new_term, 1)
    assert plan.participants == old.participants
    assert (plan.slot, plan.kind, plan.base_root) == (old.slot, old.kind, old.base_root)


def test_a_resumed_void_stays_a_void() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    world.gone(0)
    world.gone(1)
    void = world.plan
    world.start_proposer(Term(2, b"again"), promised=0)
    world.proposer.resume(void)
    world.promise(3)
    assert (world.plan.kind, world.plan.ballot.term.counter) == (SlotKind.VOID, 2)


def test_a_resumed_plan_whose_contribution_is_lost_shrinks_further() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    old = world.plan
    world.start_proposer(Term(2, b"again"), promised=0)
    world.proposer.resume(old)
    world.promise(3)
    world.gone(1)
    assert world.plan.pairs == (old.pairs[0], old.pairs[2])
    assert world.plan.ballot.attempt == 2


def test_votes_for_the_old_terms_plan_do_not_close_the_resumed_one() -> None:
    world = World()
    for number in range(3):
        world.ready(number)
    old = world.plan_bytes
    votes = [report_of(ISLANDS[n], old) for n in range(3)]
    world.start_proposer(Term(2, b"again"), promised=0)
    world.proposer.resume(decode_plan(old))
    world.promise(3)
    assert all("not the latest" in rejection(world.do(vote)) for vote in votes)


# --- the end -----------------------------------------------------------------------------------


def test_the_token_target_reached_finishes_the_run_and_nothing_follows() -> None:
    world = World(target_tokens=600)
    world.commit()
    assert world.plan_bytes == b""
    world.commit()
    assert world.chain.committed_tokens == 600
    assert kinds(world.tick()) == PLANNED
    assert (world.plan.kind, world.plan.participants) == (SlotKind.FINISH, ())
    world.report(0)
    assert world.report(1) == [], "one who is alive has not come to the end"
    assert kinds(world.report(2)) == ["CloseSlot"]
    assert last_record(world).kind is SlotKind.FINISH
    assert world.tick(1e6) == []
    assert "is not open" in rejection(world.ready(0))
    assert world.plan_bytes == b""


def world_at_its_end(islands: int = 3) -> World:
    sync = Sync(expected_islands=islands, quorum=1, grace_s=0.0)
    world = World(islands, sync, target_tokens=1)
    world.commit()
    world.tick()
    assert world.plan.kind is SlotKind.FINISH
    return world


def test_the_end_waits_for_all_who_are_alive_and_for_nobody_else() -> None:
    world = world_at_its_end(5)
    for number in range(4):
        assert world.report(number) == []
    assert kinds(world.alive(0, 1, 2, 3, promised=5)) == ["CloseSlot"]
    assert last_record(world).kind is SlotKind.FINISH


def test_reports_of_those_who_left_do_not_stand_for_one_who_is_alive() -> None:
    world = world_at_its_end(5)
    for number in range(3):
        assert world.report(number) == []
    assert world.alive(3, promised=5) == [], "three reports, one alive: not the one who reported"
    assert world.alive(0, 3, promised=5) == []
    assert kinds(world.report(3)) == ["CloseSlot"]
    assert last_record(world).kind is SlotKind.FINISH


def test_the_end_never_takes_fewer_reports_than_durability() -> None:
    world = world_at_its_end()
    world.alive(0, promised=3)
    assert world.report(0) == []
    assert world.tick(1e6) == []
    assert kinds(world.report(1)) == ["CloseSlot"]


def test_a_stranger_that_is_alive_does_not_hold_up_the_end() -> None:
    world = world_at_its_end()
    everyone = [i.island for i in ISLANDS[:3]]
    world.do(AliveChanged(frozenset([*everyone, STRANGER.island]), 3))
    world.report(0)
    world.report(1)
    assert kinds(world.report(2)) == ["CloseSlot"]


def test_holding_names_the_silent_islands() -> None:
    world = World()
    assert world.proposer.holding() == ""
    world.do(AliveChanged(frozenset({ISLANDS[0].island}), 3))
    assert "island-1, island-2: not heard for" in world.proposer.holding()


# --- any order ---------------------------------------------------------------------------------

numbers = st.integers(0, 4)
moves = st.one_of(
    st.tuples(st.just("all ready"), numbers, st.integers(0, 2)),
    st.tuples(st.just("all report"), numbers, st.just(0)),
    st.tuples(st.just("ready"), numbers, st.integers(0, 2)),
    st.tuples(st.just("report"), numbers, st.sampled_from([0, 0, 0, 1])),
    st.tuples(st.just("old report"), numbers, st.integers(0, 3)),
    st.tuples(st.just("gone"), numbers, st.sampled_from([0, 0, 1])),
    st.tuples(st.just("tick"), st.integers(0, 12), st.just(0)),
    st.tuples(st.just("restart"), st.integers(1, 5), st.just(0)),
)


def play(world: World, move: tuple[str, int, int], term: int) -> None:
    kind, number, variant = move
    island = ISLANDS[number % world.islands]
    match kind:
        case "all ready" | "all report":
            for other in range(world.islands):
                play(world, (kind.removeprefix("all "), number + other, variant), term)
        case "ready":
            root = root_of(island, world.chain.head_slot + 10 * variant)
            world.do(ready_of(island, world.chain, root=root, tokens=100 * variant))
        case "report" if world.plan_bytes:
            world.do(report_of(island, world.plan_bytes, b"odd" if variant else b"new"))
        case "old report" if world.stored:
            world.do(report_of(island, world.stored[-1 - variant % len(world.stored)]))
        case "gone" if world.plan_bytes and world.plan.participants:
            participants = world.plan.participants
            lost = participants[number % len(participants)]
            signer = island.island if variant else lost.island
            world.do(GoneArrived(signer, world.plan.slot, lost.root))
        case "tick":
            world.tick(float(number))
        case "restart":
            world.start_proposer(Term(term, b"boot"), promised=0)
            stored = [decode_plan(plan_bytes) for plan_bytes in world.stored]
            unfinished = [plan for plan in stored if plan.slot == world.chain.head_slot + 1]
            if unfinished:
                world.proposer.resume(unfinished[-1])
            world.promise(number)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 3),
    st.lists(moves, min_size=10, max_size=60),
)
def test_any_order_of_events_keeps_one_certified_record_a_slot_and_every_commit_at_quorum(
    islands: int, quorum: int, attempts: int, story: list[tuple[str, int, int]]
) -> None:
    quorum = min(quorum, islands)
    sync = Sync(expected_islands=islands, quorum=quorum, grace_s=5.0, max_attempts=attempts)
    world = World(islands, sync, target_tokens=900)
    for step, move in enumerate(story):
        play(world, move, term=step + 2)
    second = Chain(RUN, OWNER.island, sync.durability_of)
    records = [second.append(closed) for closed in world.chain.records]
    assert [r.slot for r in records] == list(range(len(records)))
    assert [c.record for c in world.closed] == [c.record for c in world.chain.records[1:]]
    assert all(len(r.commit.participants) >= quorum for r in records if r.commit)
    plans = [decode_plan(p) for p in world.stored]
    first: dict[int, Plan] = {}
    for plan in plans:
        allowed = first.setdefault(plan.slot, plan).pairs
        assert set(plan.pairs) <= set(allowed)
        assert len({p.owner for p in plan.parts}) <= len(plan.participants)
    for slot in first:
        ballots = [p.ballot for p in plans if p.slot == slot]
        assert ballots == sorted(set(ballots)), "ballots of a slot rise strictly"
