"""The log: what a record must carry before anyone believes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from protocol.chain import Base, Chain, genesis_record, matching, record_for, reports_on
from protocol.errors import BadFrame, InvariantBroken
from protocol.identity import Identity
from protocol.layout import TensorLayout
from protocol.merkle import digest
from protocol.messages import (
    Ballot,
    Certificate,
    ClosedRecord,
    Commit,
    Genesis,
    Member,
    Participant,
    Plan,
    Record,
    Report,
    Signed,
    SlotKind,
    Start,
    Term,
)
from protocol.wire import (
    decode_record,
    encode_certificate,
    encode_genesis,
    encode_plan,
    encode_record,
    encode_report,
    encode_start,
    plan_id,
    record_hash,
)

RUN = "run-1"
OWNER, STRANGER = Identity(b"owner".ljust(32)), Identity(b"stranger".ljust(32))
ISLANDS = sorted((Identity(bytes([n]) * 32) for n in range(1, 4)), key=lambda i: i.island)
VIEW = tuple(Member(i.island, f"island-{n}") for n, i in enumerate(ISLANDS))
FRAGMENT_ROOTS = (digest(b"fragment 0"), digest(b"fragment 1"))


def majority(islands: int) -> int:
    return islands // 2 + 1


def genesis(
    owner: Identity = OWNER,
    start_by: Identity = OWNER,
    run_id: str = RUN,
    start_of: str | None = None,
) -> ClosedRecord:
    layout = (TensorLayout("w", (20_000,), "float32"),)
    start = Start(start_of or run_id, digest(b"spec"), layout, FRAGMENT_ROOTS, b"")
    content = Genesis(start_by.sign("start", encode_start(start)), VIEW)
    signed = owner.sign("genesis", encode_genesis(content))
    return ClosedRecord(encode_record(genesis_record(run_id, signed)), b"")


def opened() -> Chain:
    chain = Chain(RUN, OWNER.island, majority)
    chain.append(genesis())
    return chain


def plan_for(chain: Chain, kind: SlotKind = SlotKind.COMMIT, attempt: int = 1) -> Plan:
    slot = chain.head_slot + 1
    base = chain.bases[chain.fragment_of(slot)]
    participants = tuple(
        Participant(i.island, digest(b"root" + i.island), 0.5, 100 * (n + 1), 10)
        for n, i in enumerate(ISLANDS[:2])
    )
    return Plan(
        run_id=RUN,
        ballot=Ballot(Term(1, b"boot"), attempt),
        slot=slot,
        kind=kind,
        view_slot=0,
        base_round=base.round,
        base_root=base.root,
        revision=0,
        participants=participants if kind is SlotKind.COMMIT else (),
        parts=(),
        residual_digest=b"",
        budget_s=1.0,
    )


def report_on(plan: Plan, outcome: bytes = b"new") -> Report:
    commit = plan.kind is SlotKind.COMMIT
    return Report(
        run_id=RUN,
        ballot=plan.ballot,
        slot=plan.slot,
        plan_id=plan_id(encode_plan(plan)),
        base_root=plan.base_root,
        reduced_root=digest(b"sum") if commit else b"",
        new_root=digest(outcome) if commit else b"",
        view_slot=0,
    )


def vote(island: Identity, report: Report) -> Signed:
    return island.sign("report", encode_report(report))


def votes_on(plan: Plan, islands: Sequence[Identity] = ISLANDS[:2]) -> list[Signed]:
    return [vote(island, report_on(plan)) for island in islands]


def record_by(chain: Chain, plan: Plan, outcome: bytes = b"new") -> Record:
    return record_for(plan, report_on(plan, outcome).outcome, chain.head_hash, chain)


def close(chain: Chain, plan: Plan, reports: Sequence[Signed]) -> ClosedRecord:
    """A record of what `plan` decides, with these reports."""
    return certified(record_by(chain, plan), plan, reports)


def certified(record: Record, plan: Plan, reports: Sequence[Signed]) -> ClosedRecord:
    certificate = Certificate(encode_plan(plan), tuple(reports))
    return ClosedRecord(encode_record(record), encode_certificate(certificate))


def good(chain: Chain, kind: SlotKind = SlotKind.COMMIT) -> ClosedRecord:
    plan = plan_for(chain, kind)
    return close(chain, plan, votes_on(plan))


def unchanged(chain: Chain, closed: ClosedRecord, error: type[Exception], match: str) -> None:
    before = (list(chain.records), chain.head_hash, list(chain.bases), chain.committed_tokens)
    with pytest.raises(error, match=match):
        chain.append(closed)
    assert before == (chain.records, chain.head_hash, chain.bases, chain.committed_tokens)


# --- genesis -----------------------------------------------------------------------------------


def test_genesis_opens_with_its_view_and_start_state() -> None:
    chain = Chain(RUN, OWNER.island, majority)
    assert (chain.opened, chain.head_slot) == (False, -1)
    chain.append(genesis())
    assert (chain.opened, chain.head_slot, chain.view_slot) == (True, 0, 0)
    assert chain.view == VIEW
    assert chain.durability == 2
    assert chain.bases == [Base(0, root) for root in FRAGMENT_ROOTS]
    assert chain.head_hash == record_hash(genesis().record)


def test_a_genesis_of_another_owner_is_refused() -> None:
    unchanged(
        Chain(RUN, OWNER.island, majority), genesis(STRANGER, STRANGER), BadFrame, "run's owner"
    )
    unchanged(Chain(RUN, OWNER.island, majority), genesis(STRANGER), BadFrame, "run's owner")


def test_a_start_state_signed_by_someone_else_is_refused() -> None:
    closed = genesis(OWNER, start_by=STRANGER)
    unchanged(Chain(RUN, None, majority), closed, BadFrame, "start state is signed by")


def test_without_a_pinned_owner_the_first_one_is_trusted() -> None:
    chain = Chain(RUN, None, majority)
    chain.append(genesis(STRANGER, STRANGER))
    assert chain.opened


def test_a_genesis_with_a_forged_signature_is_refused() -> None:
    record = decode_record(genesis().record)
    assert record.genesis is not None
    forged = replace(record.genesis, signature=bytes(64))
    closed = ClosedRecord(encode_record(replace(record, genesis=forged)), b"")
    unchanged(Chain(RUN, OWNER.island, majority), closed, BadFrame, "wrong signature")


def test_a_record_of_another_run_is_refused() -> None:
    closed = genesis(run_id="run-2")
    unchanged(Chain(RUN, OWNER.island, majority), closed, BadFrame, "of run run-2, this is run")
    chain = opened()
    other = replace(record_by(chain, plan_for(chain)), run_id="run-2")
    plan = plan_for(chain)
    unchanged(chain, certified(other, plan, votes_on(plan)), BadFrame, "of run run-2")


def test_a_genesis_whose_start_state_is_of_another_run_is_refused() -> None:
    closed = genesis(start_of="run-2")
    unchanged(
        Chain(RUN, OWNER.island, majority), closed, BadFrame, "genesis of run run-2, this is run"
    )


def test_a_second_genesis_is_refused() -> None:
    chain = opened()
    record = decode_record(genesis().record)
    later = replace(record, slot=1, previous=chain.head_hash)
    unchanged(chain, ClosedRecord(encode_record(later), b""), BadFrame, "belongs to slot 0")


# --- chaining ----------------------------------------------------------------------------------


def test_a_record_twice_is_accepted_and_counted_once() -> None:
    chain = opened()
    for _ in range(2):
        closed = good(chain)
        chain.append(closed)
        chain.append(closed)
    assert (len(chain.records), chain.committed_tokens) == (3, 300)


def test_the_same_content_under_another_certificate_is_the_same_record() -> None:
    chain, plan = opened(), plan_for(opened())
    later = plan_for(opened(), attempt=2)
    chain.append(close(opened(), plan, votes_on(plan)))
    chain.append(close(opened(), later, votes_on(later, ISLANDS[1:])))
    assert len(chain.records) == 2


def test_another_content_for_a_closed_slot_is_a_fork() -> None:
    chain = opened()
    void = good(chain, SlotKind.VOID)
    chain.append(good(chain))
    unchanged(chain, void, InvariantBroken, "E-LOG-FORK: slot 1 is closed with another content")
    other = genesis(OWNER, STRANGER)
    unchanged(chain, other, InvariantBroken, "E-LOG-FORK: slot 0")


def test_a_gap_is_refused() -> None:
    ahead, chain = opened(), opened()
    ahead.append(good(ahead))
    unchanged(chain, good(ahead), InvariantBroken, "slot 2 does not follow slot 0")


def test_a_wrong_previous_hash_is_a_fork() -> None:
    chain = opened()
    plan = plan_for(chain)
    record = replace(record_by(chain, plan), previous=b"x" * 32)
    closed = certified(record, plan, votes_on(plan))
    unchanged(chain, closed, InvariantBroken, "E-LOG-FORK: record of slot 1 does not follow")


def test_nothing_but_genesis_begins_a_chain() -> None:
    first = good(opened())
    unchanged(Chain(RUN, None, majority), first, InvariantBroken, "does not follow slot -1")


@pytest.mark.parametrize("kind", [SlotKind.COMMIT, SlotKind.VOID, SlotKind.FINISH])
def test_a_check_answers_like_an_append_and_changes_nothing(kind: SlotKind) -> None:
    chain = opened()
    closed = good(chain, kind)
    before = (list(chain.records), chain.head_hash, list(chain.bases), chain.committed_tokens)
    checked = chain.check(closed)
    assert before == (chain.records, chain.head_hash, chain.bases, chain.committed_tokens)
    assert not chain.finished
    assert chain.append(closed) == checked == chain.check(closed)


def test_a_check_refuses_what_an_append_would() -> None:
    chain, plan = opened(), plan_for(opened())
    with pytest.raises(BadFrame, match="1 matching"):
        chain.check(close(chain, plan, votes_on(plan, ISLANDS[:1])))
    with pytest.raises(InvariantBroken, match="E-LOG-FORK: slot 0"):
        chain.check(genesis(OWNER, STRANGER))
    with pytest.raises(BadFrame, match="of run run-2"):
        chain.check(genesis(run_id="run-2"))
    assert len(chain.records) == 1


# --- certificates ------------------------------------------------------------------------------


def test_too_few_reports_do_not_certify() -> None:
    chain, plan = opened(), plan_for(opened())
    unchanged(chain, close(chain, plan, []), BadFrame, "0 matching reports of members, 2 are")
    unchanged(chain, close(chain, plan, votes_on(plan, ISLANDS[:1])), BadFrame, "1 matching")


def test_the_same_island_twice_counts_once() -> None:
    chain, plan = opened(), plan_for(opened())
    twice = votes_on(plan, [ISLANDS[0], ISLANDS[0]])
    unchanged(chain, close(chain, plan, twice), BadFrame, "1 matching reports of members")


def test_reports_of_strangers_do_not_count() -> None:
    chain, plan = opened(), plan_for(opened())
    reports = votes_on(plan, [ISLANDS[0], STRANGER])
    unchanged(chain, close(chain, plan, reports), BadFrame, "1 matching reports of members")


def test_a_forged_signature_is_refused_though_enough_others_hold() -> None:
    chain, plan = opened(), plan_for(opened())
    forged = replace(votes_on(plan, ISLANDS[2:])[0], signature=bytes(64))
    unchanged(
        chain, close(chain, plan, [*votes_on(plan), forged]), BadFrame, "report with a wrong sig"
    )


def test_a_signature_over_another_kind_of_payload_is_refused() -> None:
    chain, plan = opened(), plan_for(opened())
    payload = encode_report(report_on(plan))
    reports = [island.sign("ready", payload) for island in ISLANDS]
    unchanged(chain, close(chain, plan, reports), BadFrame, "report with a wrong signature")


@pytest.mark.parametrize(
    "changed",
    [
        {"new_root": b"x" * 32},
        {"reduced_root": b"x" * 32},
        {"plan_id": b"x" * 32},
        {"slot": 2},
        {"run_id": "run-2"},
        {"ballot": Ballot(Term(1, b"boot"), 2)},
        {"base_root": b"x" * 32},
        {"view_slot": 1},
    ],
)
def test_one_report_that_does_not_match_spoils_the_certificate(changed: dict[str, Any]) -> None:
    chain, plan = opened(), plan_for(opened())
    odd = replace(report_on(plan), **changed)
    reports = [*votes_on(plan), vote(ISLANDS[2], odd)]
    unchanged(chain, close(chain, plan, reports), BadFrame, "matching reports of members")


def test_reports_for_another_attempt_of_the_same_content_do_not_certify() -> None:
    chain, plan = opened(), plan_for(opened())
    other = votes_on(plan_for(chain, attempt=2))
    unchanged(chain, close(chain, plan, other), BadFrame, "matching reports of members")


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"run_id": "run-2"}, "its plan is of another run or view"),
        ({"view_slot": 1}, "its plan is of another run or view"),
        ({"base_root": b"x" * 32}, "its plan builds on another base"),
        ({"base_round": 7}, "its plan builds on another base"),
    ],
)
def test_a_plan_that_all_signed_but_that_is_not_of_this_chain_does_not_certify(
    changed: dict[str, Any], match: str
) -> None:
    chain = opened()
    plan = replace(plan_for(chain), **changed)
    told = {key: value for key, value in changed.items() if key in ("run_id", "view_slot")}
    reports = [vote(island, replace(report_on(plan), **told)) for island in ISLANDS]
    unchanged(chain, close(chain, plan, reports), BadFrame, match)


def test_a_commit_on_the_base_before_the_last_one_does_not_certify() -> None:
    chain = opened()
    old = chain.bases[1]
    for _ in range(2):
        chain.append(good(chain))
    plan = replace(plan_for(chain), base_round=old.round, base_root=old.root)
    unchanged(chain, close(chain, plan, votes_on(plan)), BadFrame, "builds on another base")


def test_a_void_or_finish_with_roots_does_not_certify() -> None:
    for kind in (SlotKind.VOID, SlotKind.FINISH):
        chain = opened()
        plan = plan_for(chain, kind)
        odd = replace(report_on(plan), reduced_root=digest(b"sum"), new_root=digest(b"new"))
        reports = [vote(island, odd) for island in ISLANDS]
        unchanged(chain, close(chain, plan, reports), BadFrame, "matching reports of members")


@pytest.mark.parametrize("kind", [SlotKind.COMMIT, SlotKind.VOID, SlotKind.FINISH])
def test_a_report_is_on_a_plan_only_if_all_it_says_is_the_plans(kind: SlotKind) -> None:
    plan = plan_for(opened(), kind)
    report = report_on(plan)
    assert reports_on(report, plan)
    for changed in (
        {"run_id": "run-2"},
        {"ballot": Ballot(Term(2, b"boot"), 1)},
        {"ballot": Ballot(Term(1, b"boot"), 2)},
        {"slot": 2},
        {"base_root": b"x" * 32},
        {"view_slot": 1},
    ):
        assert not reports_on(replace(report, **changed), plan), changed
    roots = (b"s" * 32, b"n" * 32)
    none, both = (replace(report, reduced_root=a, new_root=b) for a, b in ((b"", b""), roots))
    assert reports_on(both, plan) is (kind is SlotKind.COMMIT)
    assert reports_on(none, plan) is (kind is not SlotKind.COMMIT)
    if kind is SlotKind.COMMIT:
        assert not reports_on(replace(report, new_root=b""), plan)
        assert not reports_on(replace(report, reduced_root=b""), plan)


def test_a_certificate_of_garbage_is_refused() -> None:
    chain = opened()
    record = good(chain).record
    unchanged(chain, ClosedRecord(record, b"\xff\xff"), BadFrame, "Certificate")
    unchanged(chain, ClosedRecord(b"\xff\xff", b""), BadFrame, "Record")


def test_a_record_that_differs_from_its_plan_is_refused() -> None:
    chain, plan = opened(), plan_for(opened())
    record = record_by(chain, plan)
    assert record.commit is not None
    more = tuple(p._replace(tokens=p.tokens + 1) for p in plan.participants)
    for commit in (
        replace(record.commit, participants=more),
        replace(record.commit, participants=plan.participants[:1]),
        replace(record.commit, fragment=0),
        replace(record.commit, base_round=7),
        replace(record.commit, revision=1),
        replace(record.commit, new_root=b"x" * 32),
    ):
        closed = certified(replace(record, commit=commit), plan, votes_on(plan))
        unchanged(chain, closed, BadFrame, "not what its plan decides")
    void = replace(record, kind=SlotKind.VOID, commit=None)
    unchanged(chain, certified(void, plan, votes_on(plan)), BadFrame, "not what its plan decides")


# --- what it adds up to ------------------------------------------------------------------------


def test_tokens_and_steps_count_once_when_every_fragment_has_listed_them() -> None:
    chain = opened()
    first, second, third = (i.island for i in ISLANDS)
    assert (chain.committed_tokens, chain.steps_of(first)) == (0, 0)
    for turns in (1, 2):
        for _ in chain.bases:
            chain.append(good(chain))
        assert chain.committed_tokens == 300 * turns
        assert [chain.steps_of(i) for i in (first, second, third)] == [10 * turns, 10 * turns, 0]
    assert chain.steps_of(STRANGER.island) == 0


def test_a_chain_that_is_not_open_has_counted_nothing() -> None:
    chain = Chain(RUN, None, majority)
    assert (chain.committed_tokens, chain.steps_of(ISLANDS[0].island)) == (0, 0)


def test_a_commit_moves_the_base_of_its_fragment_alone() -> None:
    chain = opened()
    chain.append(good(chain))
    assert chain.bases == [Base(0, FRAGMENT_ROOTS[0]), Base(1, digest(b"new"))]
    chain.append(good(chain))
    assert chain.bases == [Base(2, digest(b"new")), Base(1, digest(b"new"))]


def test_void_and_finish_move_no_base_and_count_nothing() -> None:
    chain = opened()
    bases = list(chain.bases)
    chain.append(good(chain, SlotKind.VOID))
    assert not chain.finished
    chain.append(good(chain, SlotKind.FINISH))
    assert chain.finished
    assert (chain.bases, chain.committed_tokens, chain.head_slot) == (bases, 0, 2)


def test_term_attempt_and_owners_are_no_part_of_the_content() -> None:
    chain, plan = opened(), plan_for(opened())
    other = replace(plan, ballot=Ballot(Term(9, b"other"), 3), budget_s=2.0)
    assert record_by(chain, plan) == record_by(chain, other)


def test_the_largest_group_of_members_that_agree_matches() -> None:
    plan = plan_for(opened())
    pairs = [
        (vote(island, report), report)
        for island, report in (
            (ISLANDS[2], report_on(plan)),
            (ISLANDS[0], report_on(plan)),
            (ISLANDS[1], report_on(plan, b"other")),
            (STRANGER, report_on(plan, b"other")),
        )
    ]
    members = frozenset(i.island for i in ISLANDS)
    assert [s.signer for s in matching(pairs, members)] == [ISLANDS[0].island, ISLANDS[2].island]
    assert matching([], members) == []


def test_a_commit_answers_who_took_part() -> None:
    commit = record_by(opened(), plan_for(opened())).commit
    assert isinstance(commit, Commit)
    assert commit.tokens == 300
    assert commit.participant(ISLANDS[0].island) == commit.participants[0]
    assert commit.participant(STRANGER.island) is None
