"""Snapshot, anchor or reset: how a commit reaches the trainer, as a table, and what is counted by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.edge_messages import Boundary, Reference
from node.handover import Handover
from protocol.messages import Commit, IslandId, Participant

ME, OTHER = IslandId(b"m" * 32), IslandId(b"o" * 32)
MINE, FRESHER = b"1" * 32, b"2" * 32
LIFE, NEXT_LIFE = "life-1", "life-2"
STEP_TOKENS = 100


def desk(
    fragments: int = 1, late: Literal["carry", "drop"] = "carry", max_carry_rounds: int = 2
) -> Handover:
    """A trainer that has just been given the start state."""
    books = Handover(ME, late, max_carry_rounds)
    books.begin(LIFE, 0, [0] * fragments)
    return books


def boundary(steps: int, fragment: int = 0, incarnation: str = LIFE) -> Boundary:
    return Boundary(0, incarnation, fragment, steps, steps * STEP_TOKENS, steps, 1.0, 0.0, 0.0)


def commit(*roots: bytes, fragment: int = 0, others: bool = True) -> Commit:
    """A commit that lists these contributions of mine (one or none), and another island's."""
    listed = [Participant(ME, root, 0.5, 500, 5) for root in roots]
    if others:
        listed.append(Participant(OTHER, b"o" * 32, 0.5, 500, 5))
    return Commit(fragment, 0, b"b" * 32, b"s" * 32, b"n" * 32, 0, tuple(listed), b"")


# --- the rule ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What was offered at step 5, what the commit lists, and what follows for a trainer at step 7."""

    claim: str
    ref: Reference
    counted: tuple[int, int] = (0, 0)
    offered: bytes | None = MINE
    listed: tuple[bytes, ...] = (MINE,)
    restarted: bool = False
    late: Literal["carry", "drop"] = "carry"
    max_carry_rounds: int = 2
    round: int = 1
    resets: int = field(default=0)


CASES = [
    Case("listed, same root, same trainer", "snapshot", counted=(500, 5)),
    Case("listed, another trainer took the steps", "anchor", restarted=True),
    Case("listed, the snapshot is gone", "reset", counted=(700, 7), offered=None, resets=1),
    Case("listed, another root offered", "reset", counted=(700, 7), offered=FRESHER, resets=1),
    Case("not listed", "anchor", listed=()),
    Case("not listed and nothing offered", "anchor", listed=(), offered=None),
    Case("late work is dropped", "reset", counted=(700, 7), listed=(), late="drop", resets=1),
    Case("listed, late work would be dropped", "snapshot", counted=(500, 5), late="drop"),
    Case("none is carried", "reset", (700, 7), listed=(), max_carry_rounds=0, resets=1),
    Case("a jump over two rounds is carried", "anchor", listed=(), round=2),
    Case("a jump over three is too old", "reset", (700, 7), listed=(), round=3, resets=1),
    Case("listed after a jump over three", "snapshot", counted=(500, 5), round=3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.claim)
def test_how_a_commit_is_applied(case: Case) -> None:
    books = desk(late=case.late, max_carry_rounds=case.max_carry_rounds)
    if case.offered is not None:
        books.snapshot(0, case.offered, boundary(5))
    if case.restarted:
        books.begin(NEXT_LIFE, 5, [0])
    waits = boundary(7, incarnation=books.incarnation)
    assert books.apply(0, case.round, commit(*case.listed), waits) == case.ref
    assert (books.counted_tokens[0], books.counted_steps[0]) == case.counted
    assert books.resets == case.resets
    assert books.fragments[0].given_round == case.round


# --- how long work is carried ------------------------------------------------------------------


def refs(books: Handover, *rounds: int, fragment: int = 0) -> list[Reference]:
    """Commits that do not list this island."""
    unlisted, waits = commit(fragment=fragment), boundary(5, fragment)
    return [books.apply(fragment, round_, unlisted, waits) for round_ in rounds]


def test_work_is_carried_over_as_many_rounds_as_the_run_allows_and_then_starts_again() -> None:
    assert refs(desk(), 1, 2, 3, 4, 5, 6) == ["anchor", "anchor", "reset"] * 2


def test_rounds_that_are_jumped_over_count_like_rounds_one_by_one() -> None:
    assert refs(desk(), 2, 3) == ["anchor", "reset"]
    assert refs(desk(), 1, 3) == ["anchor", "reset"]
    assert refs(desk(max_carry_rounds=5), 5, 6) == ["anchor", "reset"]


def test_a_round_of_another_fragment_in_between_is_not_a_round_missed() -> None:
    two = desk(fragments=2)
    assert refs(two, 2, 4, 6) == ["anchor", "anchor", "reset"]
    assert refs(two, 1, 5, fragment=1) == ["anchor", "reset"]
    assert two.resets == 2


def test_a_contribution_that_is_listed_begins_a_new_count() -> None:
    books = desk()
    assert refs(books, 1, 2) == ["anchor", "anchor"]
    books.snapshot(0, MINE, boundary(15))
    assert books.apply(0, 3, commit(MINE), boundary(15)) == "snapshot"
    assert refs(books, 4, 5, 6) == ["anchor", "anchor", "reset"]


def test_a_contribution_counts_for_one_commit_only() -> None:
    books = desk()
    books.snapshot(0, MINE, boundary(5))
    assert books.apply(0, 1, commit(MINE), boundary(5)) == "snapshot"
    assert books.apply(0, 2, commit(MINE), boundary(5)) == "reset", (
        "the same root once more is not accounted for"
    )


# --- what is counted ---------------------------------------------------------------------------


def test_what_is_not_counted_is_offered_until_a_commit_lists_it() -> None:
    books = desk()
    assert books.uncounted(0, boundary(5)) == (500, 5)
    books.snapshot(0, MINE, boundary(5))
    refs(books, 1)
    assert books.uncounted(0, boundary(8)) == (800, 8), "carried, not counted"
    books.snapshot(0, FRESHER, boundary(8))
    assert books.apply(0, 2, commit(FRESHER), boundary(8)) == "snapshot"
    assert books.uncounted(0, boundary(8)) == (0, 0)
    assert books.uncounted(0, boundary(11)) == (300, 3)


def test_steps_after_the_snapshot_are_left_for_the_next_contribution() -> None:
    books = desk()
    books.snapshot(0, MINE, boundary(5))
    books.apply(0, 1, commit(MINE), boundary(7))
    assert books.uncounted(0, boundary(7)) == (200, 2)


def test_what_was_trained_before_a_reset_is_never_offered_again() -> None:
    books = desk(fragments=2, late="drop")
    books.snapshot(0, MINE, boundary(5))
    assert books.apply(0, 2, commit(), boundary(8)) == "reset"
    assert books.uncounted(0, boundary(8)) == (0, 0), "also the steps after the snapshot are lost"
    assert books.uncounted(0, boundary(11)) == (300, 3)
    assert books.uncounted(1, boundary(11)) == (1_100, 11), "fragment 1 was not reset"
    assert books.resets == 1


def test_every_fragment_counts_the_same_trainer_for_itself() -> None:
    books = desk(fragments=2)
    books.snapshot(1, MINE, boundary(3, fragment=1))
    assert books.apply(1, 1, commit(MINE, fragment=1), boundary(3, fragment=1)) == "snapshot"
    assert books.uncounted(1, boundary(6)) == (300, 3)
    assert books.uncounted(0, boundary(6)) == (600, 6), "fragment 0 has counted nothing yet"
    books.snapshot(0, FRESHER, boundary(6))
    assert books.apply(0, 2, commit(FRESHER), boundary(6)) == "snapshot"
    assert books.uncounted(0, boundary(6)) == (0, 0)
    assert books.uncounted(1, boundary(6)) == (300, 3)


def test_a_new_trainer_counts_from_nothing_and_the_old_ones_offer_is_not_its_own() -> None:
    books = desk(fragments=2)
    books.snapshot(0, MINE, boundary(5))
    books.begin(NEXT_LIFE, 5, [4, 3])
    assert (books.incarnation, books.first_step) == (NEXT_LIFE, 5)
    assert [f.given_round for f in books.fragments] == [4, 3]
    assert [f.slot for f in books.fragments] == [0, 0]
    waits = boundary(2, incarnation=NEXT_LIFE)
    assert books.apply(0, 6, commit(MINE), waits) == "anchor"
    assert books.uncounted(0, waits) == (200, 2)


def test_an_offer_of_the_new_trainer_replaces_the_old_ones() -> None:
    books = desk()
    books.snapshot(0, MINE, boundary(5))
    books.begin(NEXT_LIFE, 5, [0])
    waits = boundary(2, incarnation=NEXT_LIFE)
    books.snapshot(0, FRESHER, waits)
    assert books.apply(0, 1, commit(FRESHER), waits) == "snapshot"
    assert (books.counted_tokens, books.counted_steps) == ([200], [2])


# --- any order ---------------------------------------------------------------------------------

moves = st.lists(
    st.tuples(st.sampled_from(["listed", "missed", "restart", "gone"]), st.integers(1, 3)),
    max_size=30,
)


@given(moves, st.sampled_from(["carry", "drop"]), st.integers(0, 3))
def test_what_is_offered_is_what_is_not_counted_yet_whatever_happens(
    story: list[tuple[str, int]], late: Literal["carry", "drop"], max_carry_rounds: int
) -> None:
    """A ledger beside the books: snapshot and reset move it on, another trainer begins a new one."""
    books, steps, round_, life = desk(late=late, max_carry_rounds=max_carry_rounds), 0, 0, 1
    ends = 0  # up to which step of this life the books have counted
    for number, (move, count) in enumerate(story):
        steps, round_ = steps + count, round_ + 1
        root = bytes([number]) * 32
        at = boundary(steps, incarnation=f"life-{life}")
        tokens, new = books.uncounted(0, at)
        assert (tokens, new) == ((steps - ends) * STEP_TOKENS, steps - ends)
        books.snapshot(0, root, at)
        match move:
            case "listed":
                assert books.apply(0, round_, commit(root), at) == "snapshot"
                ends = steps
            case "missed":
                expected = {"carry": ("anchor", "reset"), "drop": ("reset",)}[late]
                ref = books.apply(0, round_, commit(), at)
                assert ref in expected
                ends = steps if ref == "reset" else ends
            case "gone":
                books.fragments[0].snapshot = None
                assert books.apply(0, round_, commit(root), at) == "reset"
                ends = steps
            case "restart":
                life, steps, ends = life + 1, 0, 0
                books.begin(f"life-{life}", 0, [round_ - 1])
                waits = boundary(0, incarnation=f"life-{life}")
                assert books.apply(0, round_, commit(root), waits) == "anchor"
        assert (books.counted_tokens, books.counted_steps) == ([ends * STEP_TOKENS], [ends])
