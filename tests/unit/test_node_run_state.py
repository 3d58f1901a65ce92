"""What an island has on disk: journal, updates, snapshot; and how a restart comes back to the same bits."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from node.journal import Journal
from node.replica import Replica
from node.run_state import RunState
from node.site import Site
from node.update_log import UpdateLog, reduced_root_of
from outer_optimizer.codec import codec_for
from outer_optimizer.optimizer import transform_for
from protocol.chain import genesis_record, record_for
from protocol.errors import InvariantBroken
from protocol.identity import Identity
from protocol.layout import TensorLayout, build_layout
from protocol.merkle import digest, leaf, root
from protocol.messages import (
    NO_TERM,
    Ballot,
    Certificate,
    ClosedRecord,
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
TENSORS = (TensorLayout("a", (5_000,), "float32"), TensorLayout("b", (6_000,), "float32"))
SPEC = RunSpec.model_validate(
    {
        "name": "run",
        "target_tokens": 1_000_000,
        "data": {"text": ["unused"]},
        "outer": {"fragments": 2, "codec": "fp32", "lr": 0.5, "momentum": 0.5},
        "sync": {"expected_islands": 1, "cell_values": 4_096},
    }
)


def start_roots() -> tuple[bytes, ...]:
    """Of the anchor that a new replica holds: all zeros."""
    layout = build_layout(
        TENSORS, SPEC.outer.fragments, SPEC.sync.cell_values, SPEC.sync.expected_islands
    )
    replica = Replica(layout, transform_for(SPEC.outer.optimizer), codec_for(SPEC.outer.codec))
    return tuple(replica.root(number) for number in range(SPEC.outer.fragments))


START = Start(RUN, SPEC.digest(), TENSORS, start_roots(), b"")

# --- journal -----------------------------------------------------------------------------------


def report_of(slot: int, attempt: int = 1, term: Term = NO_TERM) -> Signed:
    d = digest(b"x")
    report = Report(RUN, Ballot(term, attempt), slot, d, d, d, d, 0)
    return ME.sign("report", encode_report(report))


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Callable[[], Journal]]:
    """The journal as a new process finds it: the one before never said goodbye."""
    opened: list[Journal] = []

    def open_again() -> Journal:
        opened.append(Journal(tmp_path / "journal.db"))
        return opened[-1]

    yield open_again
    for journal in opened:
        journal.close()


def test_a_promise_outlives_the_process_and_the_last_one_counts(
    reopen: Callable[[], Journal],
) -> None:
    journal = reopen()
    assert journal.promised == NO_TERM
    for term in (Term(1, b"boot"), Term(1 << 40, b"\0" * 8)):
        journal.promise(term)
        assert reopen().promised == term


def test_the_latest_vote_of_each_open_slot_comes_back_as_its_ballot(
    reopen: Callable[[], Journal],
) -> None:
    journal, later = reopen(), Term(2, b"boot")
    assert journal.ballots() == {}
    journal.vote(1, report_of(1), b"plan")
    journal.vote(1, report_of(1, 2, later), b"plan")
    journal.vote(2, report_of(2, 5), b"plan")
    assert reopen().ballots() == {1: Ballot(later, 2), 2: Ballot(NO_TERM, 5)}


def test_a_record_forgets_the_votes_of_its_slot_and_of_no_later_one(
    reopen: Callable[[], Journal],
) -> None:
    journal = reopen()
    for slot in (0, 1):
        journal.vote(slot, report_of(slot), b"plan")
    journal.append(0, ClosedRecord(b"record", b"certificate"))
    again = reopen()
    assert again.records() == [ClosedRecord(b"record", b"certificate")]
    assert set(again.ballots()) == {1}


def test_a_slot_is_appended_once_and_a_refused_record_forgets_no_vote(
    reopen: Callable[[], Journal],
) -> None:
    journal = reopen()
    journal.append(0, ClosedRecord(b"record", b""))
    journal.vote(0, report_of(0), b"plan")
    with pytest.raises(sqlite3.IntegrityError):
        journal.append(0, ClosedRecord(b"other", b""))
    again = reopen()
    assert again.records() == [ClosedRecord(b"record", b"")]
    assert set(again.ballots()) == {0}


def test_what_is_put_is_replaced_and_what_was_never_put_is_none(
    reopen: Callable[[], Journal],
) -> None:
    journal = reopen()
    assert journal.get("run") is None
    journal.put("run", b"1")
    journal.put("run", b"2")
    assert reopen().get("run") == b"2"


# --- updates -----------------------------------------------------------------------------------

CELLS = [b"one", b"two!", b""]
SIZES = [3, 4, 0]
ROOT = reduced_root_of(CELLS)


def test_the_root_of_an_update_is_merkle_over_the_digests_of_its_cells() -> None:
    assert root([leaf(digest(cell)) for cell in CELLS]) == ROOT
    assert reduced_root_of([b"one", b"two", b"!"]) != ROOT


def test_an_update_comes_back_cell_by_cell_also_in_another_process(tmp_path: Path) -> None:
    UpdateLog(tmp_path / "updates").store(ROOT, CELLS)
    updates = UpdateLog(tmp_path / "updates")
    assert updates.load(ROOT, SIZES) == CELLS
    assert updates.load(digest(b"other"), SIZES) is None
    assert len(list((tmp_path / "updates").iterdir())) == 1


@pytest.mark.parametrize("data", [b"", b"onetwo", b"onetwo?", b"onetwo!!", b"ONEtwo!"])
def test_a_damaged_update_is_none_and_its_file_is_removed(tmp_path: Path, data: bytes) -> None:
    updates = UpdateLog(tmp_path)
    updates.store(ROOT, CELLS)
    (file,) = tmp_path.iterdir()
    file.write_bytes(data)
    assert updates.load(ROOT, SIZES) is None
    assert list(tmp_path.iterdir()) == []
    assert updates.load(ROOT, SIZES) is None
    updates.store(ROOT, CELLS)
    assert updates.load(ROOT, SIZES) == CELLS


@pytest.mark.parametrize("sizes", [[3, 4], [3, 4, 1], [4, 3, 0], [7]])
def test_an_update_is_never_cut_in_other_places(tmp_path: Path, sizes: list[int]) -> None:
    updates = UpdateLog(tmp_path)
    updates.store(ROOT, CELLS)
    assert updates.load(ROOT, sizes) is None


def test_only_the_updates_that_are_still_of_use_are_kept(tmp_path: Path) -> None:
    updates = UpdateLog(tmp_path)
    many = [[b"%d" % number] for number in range(4)]
    for cells in many:
        updates.store(reduced_root_of(cells), cells)
    (tmp_path / "notes.txt").write_text("not ours")
    updates.keep_only({reduced_root_of(many[1]), reduced_root_of(many[3]), digest(b"absent")})
    kept = [updates.load(reduced_root_of(cells), [1]) for cells in many]
    assert kept == [None, many[1], None, many[3]]
    assert (tmp_path / "notes.txt").exists()
    updates.keep_only(set())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# --- the whole state ---------------------------------------------------------------------------


def genesis() -> ClosedRecord:
    content = Genesis(OWNER.sign("start", encode_start(START)), (Member(ME.island, "me"),))
    record = genesis_record(RUN, OWNER.sign("genesis", encode_genesis(content)))
    return ClosedRecord(encode_record(record), b"")


class World:
    """One island, alone in its view, so that its own vote certifies every record."""

    def __init__(self, folder: Path) -> None:
        self.site = Site("me", "nobody:1", folder, folder)
        self.start()

    def start(self) -> list[Record]:
        """A process on this disk; returns what it would have to fetch."""
        self.journal = Journal(self.site.journal)
        self.state = RunState(self.site, SPEC, START, OWNER.island, self.journal)
        if self.site.snapshot.exists():
            return self.state.restore()
        self.state.save_snapshot()
        self.state.append(genesis())
        return []

    def crash(self) -> list[Record]:
        self.journal.close()
        return self.start()

    def reduced(self, seed: int) -> list[bytes]:
        sizes = self.state.sizes(self.state.fragment_of(self.next_slot))
        draw = np.random.default_rng(seed)
        return [draw.standard_normal(s // 4).astype("<f4").tobytes() for s in sizes]

    @property
    def next_slot(self) -> int:
        return self.state.chain.head_slot + 1

    def close(self, outcome: tuple[bytes, bytes], kind: SlotKind = SlotKind.COMMIT) -> Record:
        chain = self.state.chain
        base = chain.bases[chain.fragment_of(self.next_slot)]
        participant = Participant(ME.island, digest(b"mine"), 1.0, 100, 10)
        plan = Plan(
            run_id=RUN,
            ballot=Ballot(Term(1, b"boot"), 1),
            slot=self.next_slot,
            kind=kind,
            view_slot=0,
            base_round=base.round,
            base_root=base.root,
            revision=0,
            participants=(participant,) if kind is SlotKind.COMMIT else (),
            parts=(),
            residual_digest=b"",
            budget_s=1.0,
        )
        data = encode_plan(plan)
        report = Report(
            RUN, plan.ballot, plan.slot, plan_id(data), plan.base_root, *outcome, plan.view_slot
        )
        record = record_for(plan, outcome, chain.head_hash, chain)
        certificate = Certificate(data, (ME.sign("report", encode_report(report)),))
        closed = ClosedRecord(encode_record(record), encode_certificate(certificate))
        assert self.state.append(closed) == record
        assert self.state.append(closed) is None, "a record that is here already"
        return record

    def commit(self, seed: int) -> Record:
        outcome = self.state.stage(self.next_slot, self.reduced(seed))
        record = self.close(outcome)
        self.state.swap(record)
        if self.state.snapshot_due(record):
            self.state.save_snapshot()
        return record

    def roots(self) -> list[bytes]:
        return [self.state.replica.root(number) for number in (0, 1)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.journal.close()


def test_a_swap_makes_the_staged_anchor_the_one_the_record_proves(world: World) -> None:
    for seed in range(4):
        record = world.commit(seed)
        assert record.commit is not None
        assert world.state.replica.root(record.commit.fragment) == record.commit.new_root
    assert world.state.replica.rounds == [4, 3]


def test_a_commit_that_is_not_the_staged_one_is_never_swapped_in(world: World) -> None:
    before, cells = world.roots(), world.reduced(0)
    record = world.close((digest(b"sum"), digest(b"new")))
    with pytest.raises(InvariantBroken, match="round 1: the staged anchor is not the committed"):
        world.state.swap(record)
    world.state.stage(1, cells)
    with pytest.raises(InvariantBroken, match="round 1: the staged anchor is not the committed"):
        world.state.swap(record)
    assert world.roots() == before


def test_cells_that_do_not_lead_to_the_committed_anchor_stop_the_island(world: World) -> None:
    before = world.roots()
    cells = world.reduced(0)
    record = world.close((reduced_root_of(cells), digest(b"other bits")))
    with pytest.raises(InvariantBroken, match="this machine computes other bits"):
        world.state.apply_update(record, cells)
    assert world.roots() == before


def test_a_restart_replays_the_stored_updates_to_the_same_bits(world: World) -> None:
    for seed in range(5):
        world.commit(seed)
    before, head = world.roots(), world.state.chain.head_hash
    assert world.crash() == []
    assert world.roots() == before
    assert world.state.replica.rounds == [4, 5]
    assert world.state.chain.head_hash == head
    world.commit(9)
    after = world.roots()
    assert world.crash() == []
    assert world.roots() == after


def test_a_round_that_was_staged_and_not_committed_is_forgotten_by_a_restart(world: World) -> None:
    world.commit(0)
    before = world.roots()
    world.state.stage(world.next_slot, world.reduced(1))
    assert world.crash() == []
    assert world.roots() == before


def test_a_void_between_commits_changes_nothing_at_a_restart(world: World) -> None:
    world.commit(0)
    world.close((b"", b""), SlotKind.VOID)
    world.commit(1)
    before = world.roots()
    assert world.crash() == []
    assert world.roots() == before
    assert world.state.replica.rounds == [0, 3]


def test_from_a_damaged_update_on_all_commits_are_fetched_in_order(world: World) -> None:
    for seed in range(4):
        world.commit(seed)
    before = world.roots()
    second = world.state.record(2)
    assert second.commit is not None
    file = world.site.updates / f"{second.commit.reduced_root.hex()}.cells"
    cells = world.state.stored_update(second.commit.reduced_root, 0)
    assert cells is not None
    file.write_bytes(b"damaged")
    missing = world.crash()
    assert [record.slot for record in missing] == [2, 3, 4]
    assert world.state.replica.rounds == [0, 1]
    world.state.apply_update(missing[0], cells)
    for record in missing[1:]:
        assert record.commit is not None
        stored = world.state.stored_update(record.commit.reduced_root, record.commit.fragment)
        assert stored is not None
        world.state.apply_update(record, stored)
    assert world.roots() == before


def test_a_snapshot_is_taken_now_and_then_and_old_updates_go(world: World) -> None:
    for seed in range(48):
        world.commit(seed)
    before = world.roots()
    assert len(list(world.site.updates.iterdir())) == 32
    for file in world.site.updates.iterdir():
        file.unlink()
    assert world.crash() == [], "the snapshot of round 48 needs no update"
    assert world.roots() == before


@pytest.mark.parametrize(("commits", "rounds"), [(0, (0, 0)), (3, (0, 0)), (17, (16, 15))])
@pytest.mark.parametrize("fragment", [0, 1])
def test_a_flipped_bit_in_the_snapshot_is_refused_with_the_file_and_the_remedy(
    world: World, commits: int, rounds: tuple[int, int], fragment: int
) -> None:
    for seed in range(commits):
        world.commit(seed)
    data = bytearray(world.site.snapshot.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") if fragment == 0 else -1] ^= 1
    world.site.snapshot.write_bytes(data)
    with pytest.raises(InvariantBroken) as caught:
        world.crash()
    assert str(caught.value) == (
        f"{world.site.snapshot}: damaged: fragment {fragment} is not that of round "
        f"{rounds[fragment]}: remove the file to start from the run's own"
    )
