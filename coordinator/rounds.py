"""The proposer: when a round is planned, planned again, voided, closed.

Pure: `step(event, now_s) -> effects`; effects are carried out in order. Islands are the acceptors, the
ballot is (term, attempt), the coordinator's disk only a cache: a plan is stored before it is sent, a
record is stored before anyone hears of it.

Invariants: one open slot, the one after the head; later plans of a slot use a subset of the first plan's
(island, root) pairs; a plan never has fewer than `quorum` contributions; only reports for the latest plan
of the present term count; an island's Ready is replaceable until a plan names it, never after.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.chain import Chain, matching, record_for, reports_on
from protocol.layout import Layout
from protocol.messages import (
    Ballot,
    Certificate,
    ClosedRecord,
    Digest,
    IslandId,
    Part,
    Participant,
    Plan,
    Ready,
    Report,
    Signed,
    SlotKind,
    Term,
)
from protocol.partition import assign_parts
from protocol.spec import Sync
from protocol.weights import normalised_weights
from protocol.wire import encode_certificate, encode_plan, encode_record, plan_id

# --- events ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadyArrived:
    signed: Signed
    ready: Ready


@dataclass(frozen=True)
class ReportArrived:
    signed: Signed
    report: Report


@dataclass(frozen=True)
class GoneArrived:
    """An island says that the bytes behind its own root no longer exist."""

    island: IslandId
    round: int
    root: Digest


@dataclass(frozen=True)
class AliveChanged:
    """`promised` = how many members of the view have promised our term."""

    alive: frozenset[IslandId]
    promised: int


@dataclass(frozen=True)
class Tick:
    pass


Event = ReadyArrived | ReportArrived | GoneArrived | AliveChanged | Tick

# --- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StorePlan:
    """fsync before it is sent."""

    slot: int
    attempt: int
    plan_bytes: bytes


@dataclass(frozen=True)
class SendPlan:
    plan_bytes: bytes


@dataclass(frozen=True)
class CloseSlot:
    """fsync, then tell everyone."""

    closed: ClosedRecord


@dataclass(frozen=True)
class Reject:
    reason: str


Effect = StorePlan | SendPlan | CloseSlot | Reject

# --- machine -----------------------------------------------------------------------------------


@dataclass
class _Open:
    """The slot after the head."""

    readies: dict[IslandId, Ready] = field(default_factory=dict)
    gone: set[tuple[IslandId, Digest]] = field(default_factory=set)
    plan: Plan | None = None
    plan_bytes: bytes = b""
    attempt: int = 0
    quorum_since_s: float | None = None
    reports: dict[IslandId, tuple[Signed, Report]] = field(default_factory=dict)


class Proposer:
    """Decides slots on top of `chain`, which the caller extends when it carries out CloseSlot."""

    def __init__(
        self, chain: Chain, layout: Layout, sync: Sync, target_tokens: int, term: Term
    ) -> None:
        self._chain, self._layout, self._sync = chain, layout, sync
        self._target_tokens = target_tokens
        self.term = term
        self._alive: frozenset[IslandId] = frozenset()
        self._promised = 0
        self._parts: dict[int, tuple[Part, ...]] = {}
        self._open = _Open()
        self._inherited: Plan | None = None

    def resume(self, plan: Plan) -> None:
        """The last plan of the open slot, found on disk: its content is proposed again, under our term."""
        self._inherited = plan

    def current_plan(self) -> bytes:
        return self._open.plan_bytes

    def holding(self) -> str:
        """What the open slot waits for, for people; empty when nothing is amiss."""
        if not self._chain.opened or self._chain.finished:
            return ""
        silent = sorted(m.name for m in self._chain.view if m.island not in self._alive)
        return (
            f"waiting for {', '.join(silent)}: not heard for {self._sync.lease_s} s"
            if silent
            else ""
        )

    def step(self, event: Event, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case ReadyArrived(signed, ready):
                effects += self._ready(signed.signer, ready)
            case ReportArrived(signed, report):
                effects += self._report(signed, report)
            case GoneArrived(island, round_, root):
                if round_ == self._slot and island in self._chain.members:
                    self._open.gone.add((island, root))
            case AliveChanged(alive, promised):
                self._alive, self._promised = alive, promised
            case Tick():
                pass
        return effects + self._decide(now_s)

    @property
    def _slot(self) -> int:
        return self._chain.head_slot + 1

    @property
    def _quorum(self) -> int:
        return self._sync.quorum or len(self._chain.view)

    def slot_closed(self) -> None:
        """The chain has grown: a new slot is open."""
        self._open = _Open()
        self._inherited = None

    # --- what arrives --------------------------------------------------------------------------

    def _ready(self, island: IslandId, ready: Ready) -> list[Effect]:
        if island not in self._chain.members or ready.run_id != self._chain.run_id:
            return [Reject("not a member of this run's view")]
        if ready.round != self._slot or self._chain.finished:
            return [Reject(f"round {ready.round} is not open: the open one is {self._slot}")]
        base = self._chain.bases[self._chain.fragment_of(ready.round)]
        if (ready.base_round, ready.base_root) != (base.round, base.root):
            return [
                Reject(f"the base is not the committed one of round {base.round}: catch up first")
            ]
        if self._open.plan is None:
            self._open.readies[island] = ready
        return []

    def _report(self, signed: Signed, report: Report) -> list[Effect]:
        plan = self._open.plan
        if plan is None or report.plan_id != plan_id(self._open.plan_bytes):
            return [Reject("this plan is not the latest of its slot")]
        if signed.signer not in self._chain.members or not reports_on(report, plan):
            return [Reject("a report of no member, or not on what the plan says")]
        self._open.reports[signed.signer] = (signed, report)
        return []

    # --- what follows --------------------------------------------------------------------------

    def _decide(self, now_s: float) -> list[Effect]:
        if not self._chain.opened or self._chain.finished:
            return []
        members, durability = len(self._chain.view), self._chain.durability
        if self._promised < members - durability + 1:
            return []
        if self._open.plan is not None:
            return self._close() or self._replan(now_s)
        if self._inherited is not None:
            inherited, self._inherited = self._inherited, None
            return self._propose(inherited.kind, inherited.participants)
        if self._chain.committed_tokens >= self._target_tokens:
            return self._propose(SlotKind.FINISH, ())
        return self._first_plan(now_s)

    def _first_plan(self, now_s: float) -> list[Effect]:
        ready = self._open.readies
        if len(ready) < self._quorum:
            return []
        if self._open.quorum_since_s is None:
            self._open.quorum_since_s = now_s
        waited_s = now_s - self._open.quorum_since_s
        if len(ready) < len(self._chain.view) and waited_s < self._sync.grace_s:
            return []
        islands = sorted(ready)
        return self._propose(SlotKind.COMMIT, self._weighted(islands))

    def _weighted(self, islands: list[IslandId]) -> tuple[Participant, ...]:
        ready = self._open.readies
        weights = normalised_weights([ready[i].tokens for i in islands])
        return tuple(
            Participant(i, ready[i].root, weight, ready[i].tokens, ready[i].steps)
            for i, weight in zip(islands, weights, strict=True)
        )

    def _replan(self, now_s: float) -> list[Effect]:
        """A participant lost its inputs: plan the rest again, or void the round."""
        plan = self._open.plan
        if plan is None or plan.kind is not SlotKind.COMMIT:
            return []
        left = [p for p in plan.participants if (p.island, p.root) not in self._open.gone]
        if len(left) == len(plan.participants):
            return []
        if len(left) < self._quorum or self._open.attempt >= self._sync.max_attempts:
            return self._propose(SlotKind.VOID, ())
        weights = normalised_weights([p.tokens for p in left])
        return self._propose(
            SlotKind.COMMIT,
            tuple(p._replace(weight=w) for p, w in zip(left, weights, strict=True)),
        )

    def _propose(self, kind: SlotKind, participants: tuple[Participant, ...]) -> list[Effect]:
        slot, fragment = self._slot, self._chain.fragment_of(self._slot)
        base = self._chain.bases[fragment]
        self._open.attempt += 1
        plan = Plan(
            run_id=self._chain.run_id,
            ballot=Ballot(self.term, self._open.attempt),
            slot=slot,
            kind=kind,
            view_slot=self._chain.view_slot,
            base_round=base.round,
            base_root=base.root,
            revision=0,
            participants=participants,
            parts=self._assign(fragment, participants) if participants else (),
            residual_digest=b"",
            budget_s=self._sync.budget_s,
        )
        plan_bytes = encode_plan(plan)
        self._open.plan, self._open.plan_bytes, self._open.reports = plan, plan_bytes, {}
        return [StorePlan(slot, self._open.attempt, plan_bytes), SendPlan(plan_bytes)]

    def _assign(self, fragment: int, participants: tuple[Participant, ...]) -> tuple[Part, ...]:
        rates = {
            p.island: ready.up_bps if (ready := self._open.readies.get(p.island)) else 0.0
            for p in participants
        }
        sizes = [cell.values for cell in self._layout.fragments[fragment].cells]
        parts = assign_parts(sizes, rates, self._parts.get(fragment, ()), self._sync.max_owners)
        self._parts[fragment] = parts
        return parts

    def _enough(self, plan: Plan, reports: list[Signed]) -> bool:
        """d equal reports close a slot. The run ends only when all who are alive have come to its end:
        after it nobody is left to fetch a missed round from."""
        awaited = self._alive & self._chain.members if plan.kind is SlotKind.FINISH else frozenset()
        signers = {signed.signer for signed in reports}
        return len(reports) >= self._chain.durability and awaited <= signers

    def _close(self) -> list[Effect]:
        plan = self._open.plan
        reports = matching(self._open.reports.values(), self._chain.members)
        if plan is None or not self._enough(plan, reports):
            return []
        outcome = self._open.reports[reports[0].signer][1].outcome
        record = record_for(plan, outcome, self._chain.head_hash, self._chain)
        certificate = Certificate(self._open.plan_bytes, tuple(reports))
        return [CloseSlot(ClosedRecord(encode_record(record), encode_certificate(certificate)))]
