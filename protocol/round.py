"""The island's side of a round, as a pure machine: acceptor, participant and owner in one.

`step(event, now_s) -> effects`. No socket, clock, disk or tensor inside: the daemon carries effects out
*in order* and feeds back what happened. The order is the promise: a term is stored before it is answered,
reduced cells are on disk and the new anchor is computed before a Report is made, the Report is stored
before it is sent, and nothing is applied that the chain has not certified.

    plan ──► Exchange ──► PartHeld … PartHeld ──► Stage ──► Staged ──► Vote ──► record ──► Apply

An acceptor signs iff the plan's (term, attempt) is not below the highest it signed in this slot, the term
is not below its promise *at the moment of signing*, and the plan names the view its own log ends in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.errors import InvariantBroken
from protocol.messages import (
    NO_TERM,
    Ballot,
    ClosedRecord,
    Digest,
    IslandId,
    Part,
    Plan,
    Record,
    Report,
    SlotKind,
    Term,
)

# --- events ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TermSeen:
    """A coordinator speaks under this term."""

    term: Term


@dataclass(frozen=True)
class PlanArrived:
    plan: Plan
    plan_id: Digest


@dataclass(frozen=True)
class PartHeld:
    """All reduced cells of one part are here and match the owner's signed root."""

    plan_id: Digest
    part: Part


@dataclass(frozen=True)
class Staged:
    """Reduced cells are fsynced and the new anchor stands, checked, in the spare buffer."""

    plan_id: Digest
    reduced_root: Digest
    new_root: Digest


@dataclass(frozen=True)
class RecordArrived:
    """The next record of the chain, already verified."""

    record: Record
    closed: ClosedRecord


Event = TermSeen | PlanArrived | PartHeld | Staged | RecordArrived

# --- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StorePromise:
    """fsync, before anything is answered under this term."""

    term: Term


@dataclass(frozen=True)
class RefuseTerm:
    """The sender obeys an older coordinator: answer `refused(promised)`, nothing else."""

    promised: Term


@dataclass(frozen=True)
class Exchange:
    """Take part in this plan's two-stage all-reduce: offer cells to owners, own parts, receive the sum.

    Members outside the plan receive the sum too: they apply it and vote on it like everyone else.
    """

    plan: Plan
    plan_id: Digest


@dataclass(frozen=True)
class Abandon:
    """A newer plan replaced this one, or the slot closed otherwise: stop its exchange, keep our inputs."""

    plan_id: Digest


@dataclass(frozen=True)
class ReportGone:
    """The bytes behind this island's root are no longer held: that forces a new plan."""

    plan: Plan
    root: Digest


@dataclass(frozen=True)
class Stage:
    """All parts are held: store the reduced cells, compute the new anchor into the spare buffer."""

    plan: Plan
    plan_id: Digest


@dataclass(frozen=True)
class Vote:
    """Sign, store and fsync this report with its plan, then send it."""

    report: Report
    plan: Plan


@dataclass(frozen=True)
class Apply:
    """Swap the staged anchor in (`staged`), or fetch the committed cells first (not `staged`)."""

    record: Record
    staged: bool


@dataclass(frozen=True)
class SkipRound:
    """The slot closed without a sum: anchor unchanged, contributions carried over."""

    record: Record


@dataclass(frozen=True)
class Finish:
    record: Record


Effect = (
    StorePromise
    | RefuseTerm
    | Exchange
    | Abandon
    | ReportGone
    | Stage
    | Vote
    | Apply
    | SkipRound
    | Finish
)


# --- machine -----------------------------------------------------------------------------------


@dataclass
class _Slot:
    """What this island knows of one open slot."""

    plan: Plan
    plan_id: Digest
    missing: set[Part]
    staged: Staged | None = None


@dataclass
class RoundMachine:
    """State of one island. `signed` and `promised` are restored from disk at start."""

    me: IslandId
    promised: Term = NO_TERM
    head_slot: int = -1
    view_slot: int = 0
    signed: dict[int, Ballot] = field(default_factory=dict)
    held_roots: dict[int, Digest] = field(default_factory=dict)
    slots: dict[int, _Slot] = field(default_factory=dict)

    def hold_contribution(self, round_: int, root: Digest) -> None:
        """The bytes behind `root` are in memory until the round is closed."""
        self.held_roots[round_] = root

    def may_replace_contribution(self, round_: int) -> bool:
        """A Ready may be replaced by a fresher one until a plan names its root, never after."""
        slot = self.slots.get(round_)
        return slot is None or (self.me, self.held_roots.get(round_, b"")) not in slot.plan.pairs

    def step(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case TermSeen(term):
                return self._see(term)
            case PlanArrived(plan, plan_id):
                return self._plan(plan, plan_id)
            case PartHeld(plan_id, part):
                return self._part_held(plan_id, part)
            case Staged():
                return self._staged(event)
            case RecordArrived(record, _):
                return self._record(record)

    def _see(self, term: Term) -> list[Effect]:
        if term < self.promised:
            return [RefuseTerm(self.promised)]
        if term == self.promised:
            return []
        self.promised = term
        return [StorePromise(term)]

    def _plan(self, plan: Plan, plan_id: Digest) -> list[Effect]:
        effects = self._see(plan.ballot.term)
        known = self.slots.get(plan.slot)
        if effects and isinstance(effects[0], RefuseTerm) or plan.slot <= self.head_slot:
            return effects
        if known is not None:
            if known.plan_id == plan_id:
                return effects + self._say_again(known)
            if known.plan.ballot == plan.ballot:
                raise InvariantBroken(f"two plans of slot {plan.slot} under one ballot")
            if known.plan.ballot > plan.ballot:
                return effects
            effects.append(Abandon(known.plan_id))
        slot = self.slots[plan.slot] = _Slot(plan, plan_id, set(plan.parts))
        if plan.kind is not SlotKind.COMMIT:
            slot.staged = Staged(plan_id, b"", b"")
            return effects + self._vote(slot)
        gone = self._gone(plan)
        return [*effects, *gone] if gone else [*effects, Exchange(plan, plan_id)]

    def _gone(self, plan: Plan) -> list[Effect]:
        mine = plan.participant(self.me)
        if mine is None or self.held_roots.get(plan.slot) == mine.root:
            return []
        return [ReportGone(plan, mine.root)]

    def _part_held(self, plan_id: Digest, part: Part) -> list[Effect]:
        slot = self._open(plan_id)
        if slot is None or part not in slot.missing:
            return []
        slot.missing.discard(part)
        return [] if slot.missing else [Stage(slot.plan, plan_id)]

    def _staged(self, staged: Staged) -> list[Effect]:
        slot = self._open(staged.plan_id)
        if slot is None:
            return []
        slot.staged = staged
        return self._vote(slot)

    def _say_again(self, slot: _Slot) -> list[Effect]:
        """The same plan once more: the coordinator has not heard our answer, or has forgotten it."""
        return self._vote(slot) if slot.staged is not None else self._gone(slot.plan)

    def _vote(self, slot: _Slot) -> list[Effect]:
        plan, staged = slot.plan, slot.staged
        if staged is None or not self._may_sign(plan):
            return []
        self.signed[plan.slot] = plan.ballot
        report = Report(
            run_id=plan.run_id,
            ballot=plan.ballot,
            slot=plan.slot,
            plan_id=slot.plan_id,
            base_root=plan.base_root,
            reduced_root=staged.reduced_root,
            new_root=staged.new_root,
            view_slot=plan.view_slot,
        )
        return [Vote(report, plan)]

    def _may_sign(self, plan: Plan) -> bool:
        highest = self.signed.get(plan.slot)
        return (
            (highest is None or plan.ballot >= highest)
            and plan.ballot.term >= self.promised
            and plan.view_slot == self.view_slot
            and plan.slot > self.head_slot
        )

    def _record(self, record: Record) -> list[Effect]:
        if record.slot <= self.head_slot:
            return []
        slot = self.slots.pop(record.slot, None)
        self.signed.pop(record.slot, None)
        self.held_roots.pop(record.slot, None)
        self.head_slot = record.slot
        effects: list[Effect] = []
        staged = slot.staged if slot is not None else None
        matches = (
            staged is not None
            and record.commit is not None
            and (
                (staged.reduced_root, staged.new_root)
                == (record.commit.reduced_root, record.commit.new_root)
            )
        )
        if slot is not None and not matches:
            effects.append(Abandon(slot.plan_id))
        if record.kind is SlotKind.COMMIT:
            effects.append(Apply(record, staged=matches))
        elif record.kind is SlotKind.VOID:
            effects.append(SkipRound(record))
        elif record.kind is SlotKind.FINISH:
            effects.append(Finish(record))
        return effects

    def _open(self, plan_id: Digest) -> _Slot | None:
        return next((s for s in self.slots.values() if s.plan_id == plan_id), None)
