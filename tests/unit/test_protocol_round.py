"""The island's round machine: what it promises, exchanges, signs and applies, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvariantBroken
from protocol.messages import (
    Ballot,
    ClosedRecord,
    Commit,
    IslandId,
    Part,
    Participant,
    Plan,
    Record,
    SlotKind,
    Term,
)
from protocol.round import (
    Abandon,
    Apply,
    Effect,
    Exchange,
    Finish,
    PartHeld,
    PlanArrived,
    RecordArrived,
    RefuseTerm,
    ReportGone,
    RoundMachine,
    SkipRound,
    Stage,
    Staged,
    StorePromise,
    TermSeen,
    Vote,
)

ME, OTHER = IslandId(b"m" * 32), IslandId(b"o" * 32)
MINE, THEIRS, BASE = b"1" * 32, b"2" * 32, b"b" * 32
SUM, NEW = b"s" * 32, b"n" * 32
OLD_TERM, TERM, LATER_TERM = Term(1, b"x"), Term(2, b"a"), Term(2, b"b")
HEAD = 4
SLOT = HEAD + 1


def machine(promised: Term = TERM, *, holds: bool = True) -> RoundMachine:
    """An island whose log ends in slot 4, with a contribution to round 5 in memory."""
    island = RoundMachine(ME, promised=promised, head_slot=HEAD)
    if holds:
        island.hold_contribution(SLOT, MINE)
    return island


def make_plan(
    attempt: int = 1,
    term: Term = TERM,
    kind: SlotKind = SlotKind.COMMIT,
    *,
    slot: int = SLOT,
    view_slot: int = 0,
    islands: tuple[IslandId, ...] = (ME, OTHER),
) -> Plan:
    commit = kind is SlotKind.COMMIT
    roots = {ME: MINE, OTHER: THEIRS}
    return Plan(
        run_id="run",
        ballot=Ballot(term, attempt),
        slot=slot,
        kind=kind,
        view_slot=view_slot,
        base_round=3,
        base_root=BASE,
        revision=0,
        participants=tuple(
            Participant(i, roots[i], 1 / len(islands), 100, 10) for i in islands if commit
        ),
        parts=(Part(ME, 0, 2), Part(OTHER, 2, 3)) if commit else (),
        residual_digest=b"",
        budget_s=60.0,
    )


def pid(plan: Plan) -> bytes:
    """Any digest that differs where the ballots do."""
    return repr(plan.ballot).encode().ljust(32)[-32:]


def arrive(island: RoundMachine, plan: Plan) -> list[Effect]:
    return island.step(PlanArrived(plan, pid(plan)), 0.0)


def hold_all(island: RoundMachine, plan: Plan) -> list[Effect]:
    return [e for part in plan.parts for e in island.step(PartHeld(pid(plan), part), 0.0)]


def stage(
    island: RoundMachine, plan: Plan, outcome: tuple[bytes, bytes] = (SUM, NEW)
) -> list[Effect]:
    return island.step(Staged(pid(plan), *outcome), 0.0)


def run_to_vote(island: RoundMachine, plan: Plan) -> list[Effect]:
    return [*arrive(island, plan), *hold_all(island, plan), *stage(island, plan)]


def record_of(
    kind: SlotKind = SlotKind.COMMIT, slot: int = SLOT, outcome: tuple[bytes, bytes] = (SUM, NEW)
) -> Record:
    commit = Commit(0, 3, BASE, *outcome, 0, make_plan().participants, b"")
    return Record("run", slot, kind, b"p" * 32, None, commit if kind is SlotKind.COMMIT else None)


def close(island: RoundMachine, record: Record) -> list[Effect]:
    return island.step(RecordArrived(record, ClosedRecord(b"record", b"certificate")), 0.0)


def votes(effects: list[Effect]) -> list[Vote]:
    return [e for e in effects if isinstance(e, Vote)]


# --- promises ----------------------------------------------------------------------------------


def test_a_higher_term_is_stored_once() -> None:
    island = machine(OLD_TERM)
    assert island.step(TermSeen(TERM), 0.0) == [StorePromise(TERM)]
    assert island.step(TermSeen(TERM), 0.0) == []
    assert island.promised == TERM


def test_an_older_term_is_refused_with_the_promise_and_changes_nothing() -> None:
    island = machine(TERM)
    assert island.step(TermSeen(OLD_TERM), 0.0) == [RefuseTerm(TERM)]
    assert arrive(island, make_plan(9, OLD_TERM)) == [RefuseTerm(TERM)]
    assert island.promised == TERM
    assert not island.slots


def test_terms_of_one_counter_are_ordered_by_boot_id() -> None:
    island = machine(LATER_TERM)
    assert island.step(TermSeen(TERM), 0.0) == [RefuseTerm(LATER_TERM)]


def test_the_promise_is_stored_before_a_plan_is_acted_on() -> None:
    island, plan = machine(OLD_TERM), make_plan()
    assert arrive(island, plan) == [StorePromise(TERM), Exchange(plan, pid(plan))]
    void = make_plan(1, LATER_TERM, SlotKind.VOID)
    effects = arrive(island, void)
    assert effects[0] == StorePromise(LATER_TERM)
    assert [type(e) for e in effects[1:]] == [Abandon, Vote]


# --- from plan to vote -------------------------------------------------------------------------


def test_a_plan_starts_the_exchange_also_without_a_contribution_of_mine() -> None:
    plan = make_plan()
    assert arrive(machine(), plan) == [Exchange(plan, pid(plan))]
    others = make_plan(islands=(OTHER,))
    assert arrive(machine(holds=False), others) == [Exchange(others, pid(others))]


def test_staging_begins_once_when_the_last_part_is_held() -> None:
    island, plan = machine(), make_plan()
    arrive(island, plan)
    first, last = plan.parts
    assert island.step(PartHeld(pid(plan), last), 0.0) == []
    assert island.step(PartHeld(pid(plan), last), 0.0) == []
    assert island.step(PartHeld(pid(plan), first), 0.0) == [Stage(plan, pid(plan))]
    assert island.step(PartHeld(pid(plan), first), 0.0) == []


def test_parts_of_another_plan_or_of_no_plan_are_ignored() -> None:
    island, plan, other = machine(), make_plan(), make_plan(2)
    assert hold_all(island, plan) == []
    arrive(island, plan)
    assert hold_all(island, other) == []
    assert island.step(PartHeld(pid(plan), Part(ME, 0, 5)), 0.0) == []


def test_a_staged_anchor_gives_exactly_one_vote_on_the_very_plan() -> None:
    island, plan = machine(), make_plan()
    arrive(island, plan)
    hold_all(island, plan)
    (vote,) = stage(island, plan)
    assert isinstance(vote, Vote)
    report = vote.report
    assert vote.plan == plan
    assert (report.run_id, report.ballot, report.slot) == ("run", plan.ballot, SLOT)
    assert (report.plan_id, report.view_slot, report.base_root) == (pid(plan), 0, BASE)
    assert report.outcome == (SUM, NEW)
    assert island.signed == {SLOT: plan.ballot}


def test_nothing_is_signed_before_the_anchor_is_staged() -> None:
    island, plan = machine(), make_plan()
    assert not votes(arrive(island, plan) + hold_all(island, plan))
    assert not island.signed


def test_the_same_plan_again_is_voted_on_again_and_not_exchanged_again() -> None:
    island, plan = machine(), make_plan()
    first = run_to_vote(island, plan)
    assert arrive(island, plan) == first[-1:]
    assert arrive(island, plan) == first[-1:]


def test_the_same_plan_again_in_mid_exchange_changes_nothing() -> None:
    island, plan = machine(), make_plan()
    arrive(island, plan)
    island.step(PartHeld(pid(plan), plan.parts[0]), 0.0)
    assert arrive(island, plan) == []
    assert island.step(PartHeld(pid(plan), plan.parts[1]), 0.0) == [Stage(plan, pid(plan))]


def test_void_and_finish_are_voted_on_at_once_with_an_empty_outcome() -> None:
    for kind in (SlotKind.VOID, SlotKind.FINISH):
        (vote,) = arrive(machine(holds=False), make_plan(kind=kind))
        assert isinstance(vote, Vote)
        assert vote.report.outcome == (b"", b"")


# --- replacement -------------------------------------------------------------------------------


def test_a_higher_attempt_abandons_the_exchange_and_starts_its_own() -> None:
    island, plan, again = machine(), make_plan(), make_plan(2)
    run_to_vote(island, plan)
    assert arrive(island, again) == [Abandon(pid(plan)), Exchange(again, pid(again))]
    assert stage(island, plan) == []
    assert hold_all(island, plan) == []


def test_a_higher_term_replaces_any_attempt_of_a_lower_one() -> None:
    island, plan, again = machine(), make_plan(7), make_plan(1, LATER_TERM)
    arrive(island, plan)
    assert arrive(island, again) == [
        StorePromise(LATER_TERM),
        Abandon(pid(plan)),
        Exchange(again, pid(again)),
    ]


def test_a_lower_ballot_of_an_open_slot_is_ignored() -> None:
    island, plan = machine(), make_plan(3)
    arrive(island, plan)
    assert arrive(island, make_plan(2)) == []
    hold_all(island, plan)
    assert [v.plan for v in votes(stage(island, plan))] == [plan]


@pytest.mark.parametrize("voted", [True, False])
@pytest.mark.parametrize("kind", [SlotKind.COMMIT, SlotKind.VOID])
def test_two_plans_of_a_slot_under_one_ballot_break_a_promise_and_are_not_followed(
    kind: SlotKind, voted: bool
) -> None:
    island, plan = machine(), make_plan()
    if voted:
        run_to_vote(island, plan)
    else:
        arrive(island, plan)
    signed = dict(island.signed)
    with pytest.raises(InvariantBroken, match=f"two plans of slot {SLOT} under one ballot"):
        island.step(PlanArrived(make_plan(kind=kind), b"another plan".ljust(32)), 0.0)
    assert island.slots[SLOT].plan == plan
    assert island.signed == signed


def test_equal_ballots_of_different_slots_are_different_plans() -> None:
    island, plan, later = machine(), make_plan(), make_plan(slot=SLOT + 1, islands=(OTHER,))
    arrive(island, plan)
    other = b"another plan".ljust(32)
    assert island.step(PlanArrived(later, other), 0.0) == [Exchange(later, other)]


def test_a_plan_for_a_closed_slot_is_ignored_but_its_term_is_promised() -> None:
    island = machine(OLD_TERM)
    assert arrive(island, make_plan(slot=HEAD)) == [StorePromise(TERM)]
    assert not island.slots


# --- when not to sign --------------------------------------------------------------------------


def test_no_vote_below_the_promise_at_the_moment_of_signing() -> None:
    island, plan = machine(), make_plan()
    arrive(island, plan)
    hold_all(island, plan)
    assert island.step(TermSeen(LATER_TERM), 0.0) == [StorePromise(LATER_TERM)]
    assert stage(island, plan) == []
    assert not island.signed


def test_no_vote_under_another_view_than_the_one_my_log_ends_in() -> None:
    island, plan = machine(), make_plan(view_slot=3)
    assert not votes(run_to_vote(island, plan))
    assert not votes(arrive(machine(), make_plan(kind=SlotKind.VOID, view_slot=3)))
    assert not island.signed


def test_a_restored_ballot_is_obeyed_after_a_restart() -> None:
    signed = Ballot(TERM, 2)
    for attempt, signs in ((1, False), (2, True), (3, True)):
        island = machine()
        island.signed[SLOT] = signed
        assert bool(votes(run_to_vote(island, make_plan(attempt)))) is signs
    island = machine()
    island.signed[SLOT] = signed
    assert not votes(arrive(island, make_plan(1, kind=SlotKind.VOID)))
    assert island.signed == {SLOT: signed}


def test_no_vote_once_the_slot_is_closed() -> None:
    island, plan = machine(), make_plan()
    arrive(island, plan)
    close(island, record_of())
    assert stage(island, plan) == []


ballots = st.builds(Ballot, st.sampled_from([OLD_TERM, TERM, LATER_TERM]), st.integers(1, 3))
moves = st.one_of(
    st.tuples(st.just("plan"), ballots),
    st.tuples(st.just("void"), ballots),
    st.tuples(st.just("staged"), ballots),
    st.tuples(st.just("term"), ballots),
    st.tuples(st.just("restart"), ballots),
)


@given(st.lists(moves, max_size=30))
def test_signed_ballots_of_a_slot_never_fall_and_never_fall_below_the_promise(
    story: list[tuple[str, Ballot]],
) -> None:
    island, signed, promised = machine(OLD_TERM), Ballot(OLD_TERM, 0), OLD_TERM
    for move, ballot in story:
        kind = SlotKind.VOID if move == "void" else SlotKind.COMMIT
        plan = make_plan(ballot.attempt, ballot.term, kind)
        match move:
            case "plan" | "void":
                effects = arrive(island, plan)
            case "staged":
                effects = stage(island, plan)
            case "term":
                effects = island.step(TermSeen(ballot.term), 0.0)
            case _:
                island = RoundMachine(ME, promised, HEAD, signed=dict(island.signed))
                effects = []
        for effect in effects:
            if isinstance(effect, StorePromise):
                promised = effect.term
            if isinstance(effect, Vote):
                assert effect.report.ballot >= signed
                assert effect.report.ballot.term >= promised
                signed = effect.report.ballot
        assert island.promised == promised


# --- contributions -----------------------------------------------------------------------------


def test_a_lost_contribution_is_reported_and_not_exchanged() -> None:
    plan = make_plan()
    assert arrive(machine(holds=False), plan) == [ReportGone(plan, MINE)]


def test_the_same_plan_again_repeats_that_the_contribution_is_lost() -> None:
    island, plan = machine(holds=False), make_plan()
    for _ in range(3):
        assert arrive(island, plan) == [ReportGone(plan, MINE)]


def test_another_contribution_than_the_planned_one_is_as_good_as_lost() -> None:
    island, plan = machine(), make_plan()
    island.hold_contribution(SLOT, b"fresher".ljust(32))
    assert arrive(island, plan) == [ReportGone(plan, MINE)]


def test_a_contribution_may_be_replaced_until_a_plan_names_it() -> None:
    island = machine()
    assert island.may_replace_contribution(SLOT)
    arrive(island, make_plan())
    assert not island.may_replace_contribution(SLOT)
    assert island.may_replace_contribution(SLOT + 1)


def test_a_plan_without_my_contribution_leaves_it_replaceable() -> None:
    island = machine()
    arrive(island, make_plan(islands=(OTHER,)))
    assert island.may_replace_contribution(SLOT)


# --- records -----------------------------------------------------------------------------------


def test_a_record_equal_to_what_was_staged_is_applied_from_the_spare_buffer() -> None:
    island = machine()
    run_to_vote(island, make_plan())
    assert close(island, record_of()) == [Apply(record_of(), staged=True)]
    assert (island.head_slot, island.slots, island.signed) == (SLOT, {}, {})
    assert island.may_replace_contribution(SLOT)


def test_a_record_with_another_outcome_abandons_and_fetches() -> None:
    island, plan = machine(), make_plan()
    run_to_vote(island, plan)
    other = record_of(outcome=(SUM, b"x" * 32))
    assert close(island, other) == [Abandon(pid(plan)), Apply(other, staged=False)]


def test_a_record_in_mid_exchange_abandons_and_fetches() -> None:
    island, plan = machine(), make_plan()
    arrive(island, plan)
    assert close(island, record_of()) == [Abandon(pid(plan)), Apply(record_of(), staged=False)]


def test_a_record_without_a_plan_is_fetched() -> None:
    assert close(machine(), record_of()) == [Apply(record_of(), staged=False)]


def test_a_void_record_skips_the_round_and_stops_its_exchange() -> None:
    island, plan = machine(), make_plan()
    arrive(island, plan)
    void = record_of(SlotKind.VOID)
    assert close(island, void) == [Abandon(pid(plan)), SkipRound(void)]


def test_a_finish_record_finishes() -> None:
    finish = record_of(SlotKind.FINISH)
    assert close(machine(), finish) == [Finish(finish)]


def test_an_old_record_is_ignored_even_with_another_content() -> None:
    island = machine()
    run_to_vote(island, make_plan())
    close(island, record_of())
    assert close(island, record_of()) == []
    assert close(island, replace(record_of(SlotKind.VOID), slot=HEAD)) == []
    assert island.head_slot == SLOT


def test_ballots_of_later_slots_outlive_a_record() -> None:
    island = machine()
    later = Ballot(TERM, 5)
    island.signed = {SLOT: Ballot(TERM, 1), SLOT + 1: later}
    close(island, record_of())
    assert island.signed == {SLOT + 1: later}
