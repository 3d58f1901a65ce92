"""Who is here: lobby, opening, leases, names. Time is whatever the test says it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.membership import (
    Admit,
    Effect,
    Heard,
    Left,
    Membership,
    OpenRun,
    PeersChanged,
    RefuseTerm,
    Registered,
    Reject,
    Tick,
)
from protocol.messages import Endpoint, IslandId, Member, Term

SPEC = b"s" * 32
TERM = Term(3, b"boot")
A = Member(IslandId(b"c" * 32), "ann")  # sorted by key: C, B, A
B = Member(IslandId(b"b" * 32), "bob")
C = Member(IslandId(b"a" * 32), "cyd")


def lobby(expected: int = 2, view: tuple[Member, ...] = ()) -> Membership:
    return Membership(SPEC, expected, 15.0, TERM, view)


def registration(member: Member, *, holds_start: bool = True) -> Registered:
    return Registered(member, (Endpoint(f"{member.name}:1"),), SPEC, holds_start, -1, TERM)


def register(
    here: Membership, member: Member, now_s: float = 0.0, *, holds_start: bool = True
) -> list[Effect]:
    return here.step(registration(member, holds_start=holds_start), now_s)


def opened() -> Membership:
    here = lobby()
    register(here, A)
    register(here, B)
    return here


def reason(effects: list[Effect]) -> str:
    (reject,) = effects
    assert isinstance(reject, Reject)
    return reject.reason


# --- lobby and opening -------------------------------------------------------------------------


def test_a_registration_is_admitted_and_told_to_everyone() -> None:
    here = lobby()
    assert register(here, A) == [Admit(A.island), PeersChanged()]
    assert here.alive == {A.island}
    assert here.present[A.island].endpoints == (Endpoint("ann:1"),)


def test_the_run_opens_once_with_exactly_the_expected_islands_in_sorted_order() -> None:
    here = lobby(3)
    assert OpenRun not in {type(e) for e in register(here, A) + register(here, B)}
    assert register(here, C) == [Admit(C.island), PeersChanged(), OpenRun((C, B, A))]
    assert here.view == (C, B, A)
    assert register(here, C) == [Admit(C.island), PeersChanged()]


def test_an_island_without_the_start_state_does_not_open_the_run() -> None:
    here = lobby()
    register(here, A)
    assert register(here, B, holds_start=False) == [Admit(B.island), PeersChanged()]
    assert here.view == ()
    assert register(here, B)[-1] == OpenRun((B, A))


def test_one_island_registering_twice_counts_once() -> None:
    here = lobby()
    register(here, A)
    assert register(here, A) == [Admit(A.island), PeersChanged()]
    assert here.view == ()


def test_a_second_registration_replaces_the_addresses() -> None:
    here = lobby()
    register(here, A)
    here.step(replace(registration(A), endpoints=(Endpoint("moved:2"),)), 1.0)
    assert here.present[A.island].endpoints == (Endpoint("moved:2"),)


# --- refusals ----------------------------------------------------------------------------------


def test_another_spec_is_rejected_and_not_present() -> None:
    here = lobby()
    effects = here.step(replace(registration(A), spec_digest=b"t" * 32), 0.0)
    assert "run spec is not the run's" in reason(effects)
    assert not here.present


def test_a_taken_name_is_rejected_before_and_after_opening() -> None:
    stranger = Member(IslandId(b"x" * 32), "ann")
    here = lobby(3)
    register(here, A)
    assert "'ann' is taken" in reason(register(here, stranger))
    here = opened()
    here.step(Left(A.island), 1.0)
    assert "'ann' is taken" in reason(register(here, stranger)), "the view still holds the name"


def test_an_unknown_island_is_rejected_once_the_run_is_under_way() -> None:
    here = opened()
    text = reason(register(here, C))
    assert "already under way with bob, ann" in text
    assert C.island not in here.present


def test_a_member_under_another_name_is_rejected_after_opening() -> None:
    assert "use its --name" in reason(register(opened(), A._replace(name="anna")))


@pytest.mark.parametrize("promise", [Term(2, b"boot"), Term(3, b"other"), Term(4, b"boot")])
def test_a_promise_to_another_term_is_refused_and_is_no_registration(promise: Term) -> None:
    here = lobby()
    assert here.step(replace(registration(A), promise=promise), 0.0) == [RefuseTerm()]
    assert not here.present


def test_after_a_restart_the_view_is_known_but_nobody_has_promised() -> None:
    here = lobby(view=(B, A))
    assert (here.promised(), here.alive) == (0, frozenset())
    assert register(here, A) == [Admit(A.island), PeersChanged()]
    assert here.promised() == 1
    assert register(here, B) == [Admit(B.island), PeersChanged()]
    assert here.promised() == 2


def test_only_members_of_the_view_count_as_promised() -> None:
    here = lobby()
    register(here, C, holds_start=False)
    register(here, A)
    register(here, B)
    assert here.promised() == 2


# --- leases ------------------------------------------------------------------------------------


def test_a_lease_ends_only_after_its_time_since_the_last_word() -> None:
    here = opened()
    here.step(Heard(A.island), 10.0)
    assert here.step(Tick(), 15.0) == []
    assert here.step(Tick(), 15.1) == [PeersChanged()]
    assert here.alive == {A.island}
    assert here.step(Tick(), 16.0) == [], "said once"
    assert here.step(Tick(), 25.0) == []
    assert here.step(Tick(), 25.1) == [PeersChanged()]
    assert here.alive == frozenset()


def test_silence_before_opening_frees_place_and_name() -> None:
    here = lobby()
    register(here, A)
    assert here.step(Tick(), 15.1) == [PeersChanged()]
    assert not here.present
    assert register(here, B, 16.0) == [Admit(B.island), PeersChanged()]
    assert register(here, A._replace(island=C.island), 16.0)[-1] == OpenRun(
        (A._replace(island=C.island), B)
    )


def test_silence_after_opening_keeps_member_and_promise() -> None:
    here = opened()
    here.step(Tick(), 15.1)
    assert here.alive == frozenset()
    assert here.promised() == 2
    assert here.view == (B, A)


def test_an_island_heard_again_is_alive_again_and_told_once() -> None:
    here = opened()
    here.step(Tick(), 15.1)
    assert here.step(Heard(A.island), 20.0) == [PeersChanged()]
    assert here.step(Heard(A.island), 21.0) == []
    assert here.alive == {A.island}
    assert here.step(Tick(), 35.0) == []


def test_an_island_that_registers_again_is_alive_again() -> None:
    here = opened()
    here.step(Tick(), 15.1)
    register(here, B, 20.0)
    assert here.alive == {B.island}


def test_a_word_of_an_unknown_island_makes_nobody_present() -> None:
    here = lobby()
    assert here.step(Heard(A.island), 0.0) == []
    assert not here.present


# --- leaving -----------------------------------------------------------------------------------


def test_who_leaves_is_gone_at_once_and_may_come_back() -> None:
    here = opened()
    assert here.step(Left(A.island), 1.0) == [PeersChanged()]
    assert here.step(Left(A.island), 1.0) == []
    assert here.alive == {B.island}
    assert here.view == (B, A)
    assert register(here, A, 2.0) == [Admit(A.island), PeersChanged()]


def test_who_leaves_the_lobby_does_not_count_for_the_opening() -> None:
    here = lobby()
    register(here, A)
    here.step(Left(A.island), 1.0)
    register(here, B, 2.0)
    assert here.view == ()
    assert register(here, C, 3.0)[-1] == OpenRun((C, B))
