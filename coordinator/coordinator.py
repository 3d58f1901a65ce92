"""The coordinator: decodes what arrives, lets the pure machines decide, carries their effects out.

All state is owned by one event loop; every handler runs to its end without waiting, so no two ever
interleave. Order of effects = order of machine: a plan is on disk before it is sent, a record is on disk
before anyone hears of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from coordinator import membership as m
from coordinator import rounds as r
from coordinator.hub import Hub
from coordinator.store import Store
from protocol import atoll_coordinator_pb2 as pb
from protocol import atoll_records_pb2 as records_pb
from protocol.chain import Chain, genesis_record
from protocol.errors import BadFrame, ConfigError
from protocol.identity import short, verified
from protocol.layout import Layout, build_layout
from protocol.messages import ClosedRecord, Endpoint, Genesis, IslandId, Signed, Term
from protocol.run_files import Run
from protocol.transport import host_of
from protocol.wire import (
    closed_to_pb,
    decode_part_root,
    decode_plan,
    decode_ready,
    decode_report,
    encode_genesis,
    encode_record,
    member_from_pb,
    member_to_pb,
    parse,
    signed_from_pb,
    signed_to_pb,
    term_from_pb,
    term_to_pb,
)

MAX_ENDPOINTS = 64

log = structlog.get_logger()


class Coordinator:
    """One run. `now_s` is a monotonic clock."""

    def __init__(
        self, run: Run, state: Path, now_s: Callable[[], float], donors: Sequence[str] = ()
    ) -> None:
        self._run, self._now_s, self._donors = run, now_s, tuple(donors)
        spec, start = run.spec, run.start
        self._store = Store(state / "coordinator.db")
        self.term = Term(self._store.raise_term(), os.urandom(8))
        self.hub = Hub()
        self.chain = Chain(start.run_id, run.owner.island, spec.sync.durability_of)
        for closed in self._store.records():
            self.chain.append(closed)
        self._membership = m.Membership(
            spec.digest(), spec.sync.expected_islands, spec.sync.lease_s, self.term, self.chain.view
        )
        self._proposer = r.Proposer(
            self.chain, layout_of(run), spec.sync, spec.target_tokens, self.term
        )
        unfinished = self._store.last_plan(self.chain.head_slot + 1)
        if unfinished is not None:
            self._proposer.resume(decode_plan(unfinished))
        self._progress: dict[IslandId, pb.Progress] = {}
        self._left: set[IslandId] = set()
        self._holding = ""

    # --- what may be asked ---------------------------------------------------------------------

    def describe(self) -> pb.DescribeReply:
        return pb.DescribeReply(
            run_id=self._run.start.run_id,
            spec_json=self._run.spec.canonical_json().decode(),
            start=signed_to_pb(self._run.signed_start),
            tokenizer_json=self._run.tokenizer_json,
            donors=self._donors,
        )

    def status(self) -> pb.StatusReply:
        return pb.StatusReply(
            run_id=self._run.start.run_id,
            term=term_to_pb(self.term),
            head_slot=max(0, self.chain.head_slot),
            opened=self.chain.opened,
            finished=self.chain.finished,
            committed_tokens=self.chain.committed_tokens,
            target_tokens=self._run.spec.target_tokens,
            islands=[
                pb.IslandStatus(
                    peer=entry, progress=self._progress.get(IslandId(entry.member.island))
                )
                for entry in self._peer_entries()
            ],
            holding=self._proposer.holding(),
        )

    @property
    def all_gone(self) -> bool:
        """The run is finished and every member has said goodbye."""
        return self.chain.finished and self.chain.members <= self._left

    # --- what nodes send -----------------------------------------------------------------------

    def register(self, request: pb.RegisterRequest) -> pb.RegisterReply:
        signed = signed_from_pb(request.registration)
        registration = parse(pb.Registration, verified(signed, "registration"))
        if registration.run_id != self.chain.run_id:
            raise BadFrame(f"this is run {self.chain.run_id}, not {registration.run_id}")
        event = registration_event(registration, signed.signer)
        reply = pb.RegisterReply(
            term=term_to_pb(self.term), heartbeat_s=self._run.spec.sync.heartbeat_s
        )
        for effect in self._membership.step(event, self._now_s()):
            match effect:
                case m.RefuseTerm():
                    reply.refused = True
                case m.Reject(reason):
                    reply.rejected = reason
                    log.warning("rejected", island=event.member.name, reason=reason)
                case m.Admit():
                    log.info("registered", island=event.member.name, holds_start=event.holds_start)
                case _:
                    self._carry_out_membership(effect)
        return reply

    def post(self, request: pb.PostRequest) -> pb.PostReply:
        if tuple(request.term.boot_id) != tuple(self.term.boot_id):
            return pb.PostReply(term=term_to_pb(self.term), refused=True)
        kind = request.WhichOneof("body")
        if kind is None:
            raise BadFrame("a post without content")
        signed = signed_from_pb(getattr(request, kind))
        payload = verified(signed, kind)
        self._heard(signed.signer)
        rejected = self._posted(kind, signed, payload)
        return pb.PostReply(term=term_to_pb(self.term), rejected=rejected)

    def _posted(self, kind: str, signed: Signed, payload: bytes) -> str:
        match kind:
            case "ready":
                return self._decide(r.ReadyArrived(signed, decode_ready(payload)))
            case "report":
                return self._decide(r.ReportArrived(signed, decode_report(payload)))
            case "gone":
                gone = parse(pb.Gone, payload)
                return self._decide(r.GoneArrived(signed.signer, gone.round, gone.root))
            case "part_root":
                decode_part_root(payload)
                if signed.signer not in self.chain.members:
                    return "not a member of this run's view"
                self._publish(pb.Event(part_root=signed_to_pb(signed)))
            case "progress":
                if signed.signer not in self._membership.present:
                    return "register first"
                self._progress[signed.signer] = parse(pb.Progress, payload)
            case "leave":
                known = self.chain.members | self._membership.present.keys()
                if signed.signer not in known or payload != self.chain.run_id.encode():
                    return "not of this run"
                self._left.add(signed.signer)
                for effect in self._membership.step(m.Left(signed.signer), self._now_s()):
                    self._carry_out_membership(effect)
        return ""

    def tick(self) -> None:
        """Called a few times a second: leases run out, grace windows end."""
        for effect in self._membership.step(m.Tick(), self._now_s()):
            self._carry_out_membership(effect)
        self._decide(r.Tick())
        holding = self._proposer.holding()
        if holding != self._holding:
            log.warning("held", reason=holding) if holding else log.info("going_on")
            self._holding = holding

    def _heard(self, island: IslandId) -> None:
        for effect in self._membership.step(m.Heard(island), self._now_s()):
            self._carry_out_membership(effect)

    # --- effects -------------------------------------------------------------------------------

    def _carry_out_membership(self, effect: m.Effect) -> None:
        match effect:
            case m.PeersChanged():
                self._publish(pb.Event(peers=pb.Peers(peers=self._peer_entries())))
                self._publish(self._lobby())
                self._decide(r.AliveChanged(self._membership.alive, self._membership.promised()))
            case m.OpenRun(view):
                payload = encode_genesis(Genesis(self._run.signed_start, view))
                signed = self._run.owner.sign("genesis", payload)
                record = encode_record(genesis_record(self.chain.run_id, signed))
                try:
                    self._append(ClosedRecord(record, b""))
                except BaseException:
                    self._membership.view = ()  # not opened: the next registration tries again
                    raise
                self._decide(r.AliveChanged(self._membership.alive, self._membership.promised()))
            case _:
                pass

    def _decide(self, event: r.Event) -> str:
        """Steps the proposer and carries out; returns why the event was rejected, or nothing."""
        rejected = ""
        for effect in self._proposer.step(event, self._now_s()):
            match effect:
                case r.StorePlan(slot, attempt, plan_bytes):
                    self._store.save_plan(slot, attempt, plan_bytes)
                case r.SendPlan(plan_bytes):
                    self._log_plan(plan_bytes)
                    self._publish(pb.Event(plan=plan_bytes))
                case r.CloseSlot(closed):
                    self._append(closed)
                    self._decide(r.Tick())
                case r.Reject(reason):
                    rejected = reason
        return rejected

    def _append(self, closed: ClosedRecord) -> None:
        self._store.append(self.chain.check(closed).slot, closed)
        record = self.chain.append(closed)
        self._proposer.slot_closed()
        self._publish(pb.Event(record=closed_to_pb(closed)))
        log.info(
            "closed",
            slot=record.slot,
            kind=record.kind.name.lower(),
            islands=len(record.commit.participants) if record.commit else None,
            new_root=record.commit.new_root.hex()[:16] if record.commit else None,
        )

    def _log_plan(self, plan_bytes: bytes) -> None:
        plan = decode_plan(plan_bytes)
        log.info(
            "planned",
            slot=plan.slot,
            kind=plan.kind.name.lower(),
            attempt=plan.ballot.attempt,
            islands=[short(p.island) for p in plan.participants],
        )

    # --- events for watchers -------------------------------------------------------------------

    def _publish(self, event: pb.Event) -> None:
        self.hub.publish(self._event(event))

    def _event(self, event: pb.Event) -> bytes:
        event.term.CopyFrom(term_to_pb(self.term))
        return event.SerializeToString()

    def history(self, from_slot: int) -> list[bytes]:
        """What a new watcher has to know before live events: records, peers, the open plan."""
        records = [pb.Event(record=closed_to_pb(c)) for c in self.chain.records[from_slot:]]
        now = [pb.Event(peers=pb.Peers(peers=self._peer_entries())), self._lobby()]
        plan = self._proposer.current_plan()
        return [self._event(e) for e in [*records, *now, *([pb.Event(plan=plan)] if plan else [])]]

    def beat(self) -> bytes:
        return self._event(pb.Event(beat=pb.Beat()))

    def _lobby(self) -> pb.Event:
        present = sum(p.holds_start for p in self._membership.present.values())
        expected = self._run.spec.sync.expected_islands
        return pb.Event(lobby=pb.Lobby(present=present, expected=expected))

    def _peer_entries(self) -> list[pb.PeerEntry]:
        return [
            pb.PeerEntry(
                member=member_to_pb(p.member),
                endpoints=[pb.Endpoint(**endpoint._asdict()) for endpoint in p.endpoints],
                alive=p.alive,
            )
            for p in sorted(self._membership.present.values(), key=lambda p: p.member)
        ]

    def close(self) -> None:
        self.hub.close()
        self._store.close()


def registration_event(registration: pb.Registration, island: IslandId) -> m.Registered:
    if len(registration.endpoints) > MAX_ENDPOINTS:
        raise BadFrame(f"registration: at most {MAX_ENDPOINTS} endpoints")
    for endpoint in registration.endpoints:
        try:
            host_of(endpoint.address)
        except ConfigError as error:
            raise BadFrame(f"registration: {error}") from None
    return m.Registered(
        member=member_from_pb(records_pb.Member(island=island, name=registration.name)),
        endpoints=tuple(Endpoint(e.address, e.first_cell, e.cells) for e in registration.endpoints),
        spec_digest=registration.spec_digest,
        holds_start=registration.holds_start,
        head_slot=registration.head_slot,
        promise=term_from_pb(registration.promise),
    )


def layout_of(run: Run) -> Layout:
    spec = run.spec
    return build_layout(
        run.start.layout, spec.outer.fragments, spec.sync.cell_values, spec.sync.expected_islands
    )
