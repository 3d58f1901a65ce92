"""What nodes send to the coordinator: who may say what, and what reaches the disk. Real bytes, no network."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.coordinator import Coordinator
from coordinator.store import Store
from protocol import atoll_coordinator_pb2 as pb
from protocol.chain import Chain
from protocol.errors import BadFrame, InvariantBroken
from protocol.identity import Identity
from protocol.layout import TensorLayout
from protocol.merkle import digest
from protocol.messages import ClosedRecord, PartRoot, Plan, Ready, Report, Signed, SlotKind, Start
from protocol.run_files import Run
from protocol.spec import RunSpec
from protocol.wire import (
    decode_plan,
    encode_part_root,
    encode_ready,
    encode_report,
    encode_start,
    plan_id,
    signed_to_pb,
    term_to_pb,
)

RUN = "run-1"
OWNER = Identity(b"owner".ljust(32, b"."))
ISLANDS = sorted(
    (Identity(name.encode().ljust(32, b".")) for name in "abc"), key=lambda i: i.island
)
A, B, C = ISLANDS
STRANGER = Identity(b"stranger".ljust(32, b"."))
SPEC = RunSpec.model_validate(
    {
        "name": "run",
        "target_tokens": 1_000_000,
        "data": {"text": ["unused"]},
        "sync": {"expected_islands": 3, "quorum": 2},
    }
)


def make_run() -> Run:
    layout = (TensorLayout("w", (20_000,), "float32"),)
    start = Start(RUN, SPEC.digest(), layout, (digest(b"start"),), b"")
    return Run(SPEC, OWNER, OWNER.sign("start", encode_start(start)), start, b"")


class World:
    """A coordinator on a disk of its own; time is whatever the test says it is."""

    def __init__(self, state: Path) -> None:
        self.state, self.now_s = state, 0.0
        self.coordinator = Coordinator(make_run(), state, lambda: self.now_s)

    @property
    def chain(self) -> Chain:
        return self.coordinator.chain

    def register(self, island: Identity, **changes: Any) -> pb.RegisterReply:
        registration = pb.Registration(
            run_id=RUN,
            name=f"island-{island.island.hex()[:4]}",
            spec_digest=SPEC.digest(),
            holds_start=True,
            promise=term_to_pb(self.coordinator.term),
        )
        for key, value in changes.items():
            setattr(registration, key, value)
        signed = island.sign("registration", registration.SerializeToString())
        return self.coordinator.register(pb.RegisterRequest(registration=signed_to_pb(signed)))

    def open(self) -> None:
        for island in ISLANDS:
            self.register(island)
        assert self.chain.opened

    def post(self, kind: str, signed: Signed) -> str:
        request = pb.PostRequest(term=term_to_pb(self.coordinator.term))
        getattr(request, kind).CopyFrom(signed_to_pb(signed))
        return self.coordinator.post(request).rejected

    def ready(self, island: Identity) -> str:
        base = self.chain.bases[0]
        ready = Ready(
            run_id=RUN,
            round=self.chain.head_slot + 1,
            base_round=base.round,
            base_root=base.root,
            revision=0,
            root=digest(island.island),
            tokens=100,
            steps=10,
            up_bps=1e6,
            squared_norms=(1.0,),
        )
        return self.post("ready", island.sign("ready", encode_ready(ready)))

    def gone(self, island: Identity, root: bytes) -> str:
        gone = pb.Gone(run_id=RUN, round=self.chain.head_slot + 1, root=root)
        return self.post("gone", island.sign("gone", gone.SerializeToString()))

    def report(self, island: Identity) -> str:
        plan = self.plan
        commit = plan.kind is SlotKind.COMMIT
        report = Report(
            run_id=RUN,
            ballot=plan.ballot,
            slot=plan.slot,
            plan_id=plan_id(self.plan_bytes),
            base_root=plan.base_root,
            reduced_root=digest(b"sum") if commit else b"",
            new_root=digest(b"new") if commit else b"",
            view_slot=plan.view_slot,
        )
        return self.post("report", island.sign("report", encode_report(report)))

    @property
    def plan_bytes(self) -> bytes:
        (event,) = (e for e in map(event_of, self.coordinator.history(0)) if e.HasField("plan"))
        return event.plan

    @property
    def plan(self) -> Plan:
        return decode_plan(self.plan_bytes)

    def stored(self) -> list[ClosedRecord]:
        """What a process that comes after a crash would read."""
        store = Store(self.state / "coordinator.db")
        try:
            return store.records()
        finally:
            store.close()


def event_of(data: bytes) -> pb.Event:
    event = pb.Event()
    event.ParseFromString(data)
    return event


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.coordinator.close()


# --- registration ------------------------------------------------------------------------------


def test_a_registration_for_another_run_is_refused_and_makes_nobody_present(world: World) -> None:
    with pytest.raises(BadFrame, match="this is run run-1, not run-2"):
        world.register(A, run_id="run-2")
    assert not world.coordinator.status().islands
    world.register(A)
    assert len(world.coordinator.status().islands) == 1


# --- gone --------------------------------------------------------------------------------------


def test_only_the_owner_of_a_contribution_can_say_that_it_is_gone(world: World) -> None:
    world.open()
    for island in ISLANDS:
        assert world.ready(island) == ""
    for other in (B, C, STRANGER):
        world.gone(other, digest(A.island))
        assert world.plan.ballot.attempt == 1
    world.gone(A, digest(A.island))
    assert world.plan.ballot.attempt == 2
    assert [p.island for p in world.plan.participants] == [B.island, C.island]


# --- part roots ---------------------------------------------------------------------------------


def part_root(island: Identity) -> Signed:
    part = PartRoot(RUN, digest(b"plan"), 0, 1, digest(b"sum"), b"", b"", (1.0,))
    return island.sign("part_root", encode_part_root(part))


def test_part_roots_are_told_to_all_and_only_those_of_members(world: World) -> None:
    assert "not a member" in world.post("part_root", part_root(A)), "nobody is one before genesis"
    world.open()
    watcher = world.coordinator.hub.subscribe()
    assert "not a member" in world.post("part_root", part_root(STRANGER))
    assert watcher.empty()
    assert world.post("part_root", part_root(A)) == ""
    data = watcher.get_nowait()
    assert data is not None
    assert event_of(data).part_root == signed_to_pb(part_root(A))
    assert watcher.empty()


# --- progress ----------------------------------------------------------------------------------


def progress(island: Identity, steps: int) -> Signed:
    return island.sign("progress", pb.Progress(run_id=RUN, steps=steps).SerializeToString())


def test_progress_counts_only_from_who_is_registered(world: World) -> None:
    assert world.post("progress", progress(A, 5)) == "register first"
    world.register(A)
    assert [entry.progress.steps for entry in world.coordinator.status().islands] == [0]
    assert world.post("progress", progress(A, 7)) == ""
    assert world.post("progress", progress(STRANGER, 9)) == "register first"
    assert [entry.progress.steps for entry in world.coordinator.status().islands] == [7]


# --- before the run is open --------------------------------------------------------------------


def test_whatever_comes_before_the_run_is_open_is_answered_and_changes_nothing(
    world: World,
) -> None:
    world.register(A)
    ready = Ready(RUN, 0, 0, digest(b"start"), 0, digest(b"x"), 1, 1, 0.0, ())
    for island in (A, STRANGER):
        signed = island.sign("ready", encode_ready(ready))
        assert "not a member" in world.post("ready", signed)
        assert world.gone(island, digest(b"x")) == ""
    assert world.stored() == []


# --- what reaches the disk ---------------------------------------------------------------------


def test_a_closed_slot_is_on_disk_and_a_new_process_goes_on_from_it(world: World) -> None:
    world.open()
    for island in ISLANDS:
        world.ready(island)
    world.report(A)
    world.report(B)
    assert world.chain.head_slot == 1
    assert world.stored() == world.chain.records
    again = Coordinator(make_run(), world.state, lambda: 0.0)
    assert again.chain.head_hash == world.chain.head_hash
    assert again.term.counter == world.coordinator.term.counter + 1
    again.close()


@pytest.mark.parametrize("error", [BadFrame, InvariantBroken])
def test_a_record_that_the_chain_does_not_take_is_never_stored_nor_told(
    world: World, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    world.open()
    for island in ISLANDS:
        world.ready(island)
    world.report(A)
    before = world.stored()
    watcher = world.coordinator.hub.subscribe()

    def refuse(closed: ClosedRecord) -> None:
        raise error("not certified")

    with monkeypatch.context() as patched:
        patched.setattr(world.chain, "check", refuse)
        with pytest.raises(error, match="not certified"):
            world.report(B)
    assert world.stored() == before
    assert watcher.empty()
    world.report(C)
    assert world.stored() == world.chain.records
    assert world.chain.head_slot == 1


def test_a_disk_that_takes_no_record_leaves_the_chain_where_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.open()
    for island in ISLANDS:
        world.ready(island)
    world.report(A)
    before, head = world.stored(), world.chain.head_hash
    watcher = world.coordinator.hub.subscribe()

    def full(store: Store, slot: int, closed: ClosedRecord) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "append", full)
        with pytest.raises(sqlite3.OperationalError, match="disk is full"):
            world.report(B)
    assert (world.chain.head_slot, world.chain.head_hash) == (0, head)
    assert world.stored() == world.chain.records == before
    assert watcher.empty()
    world.report(C)
    assert world.chain.head_slot == 1
    assert world.stored() == world.chain.records
