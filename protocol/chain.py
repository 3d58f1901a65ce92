"""The log that all hold: dense, hash-chained, every record with the reports that decided it.

Pure. Coordinator and islands keep the same chain and check every record in the same way before they
believe it; an announced record is never replaced.

Invariants: slot k + 1 follows slot k and names its hash; a record above genesis carries at least
`durability` signed reports of members of the view in force, all for one plan with that very content;
slots close in number order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from protocol.errors import BadFrame, InvariantBroken
from protocol.identity import short, verified
from protocol.messages import (
    Certificate,
    ClosedRecord,
    Commit,
    Digest,
    IslandId,
    Member,
    Plan,
    Record,
    Report,
    Signed,
    SlotKind,
    Start,
)
from protocol.wire import (
    decode_certificate,
    decode_genesis,
    decode_plan,
    decode_record,
    decode_report,
    decode_start,
    encode_record,
    plan_id,
    record_hash,
)


@dataclass(frozen=True)
class Base:
    """What a fragment's next contribution is measured against."""

    round: int  # last committed round of the fragment, 0 = start state
    root: Digest


class Chain:
    """Grows by `append` only. `owner` pins the key that must have signed genesis (None = trust the first)."""

    def __init__(
        self, run_id: str, owner: IslandId | None, durability: Callable[[int], int]
    ) -> None:
        self.run_id, self._owner, self._durability = run_id, owner, durability
        self.records: list[ClosedRecord] = []
        self.head_hash: Digest = b""
        self.start: Start | None = None
        self.view: tuple[Member, ...] = ()
        self.view_slot = 0
        self.bases: list[Base] = []
        self._fragment_tokens = 0
        self._fragment_steps: dict[IslandId, int] = {}
        self.finished = False

    @property
    def opened(self) -> bool:
        return bool(self.records)

    @property
    def head_slot(self) -> int:
        """Last closed slot; -1 before genesis."""
        return len(self.records) - 1

    @property
    def members(self) -> frozenset[IslandId]:
        return frozenset(member.island for member in self.view)

    @property
    def durability(self) -> int:
        """Matching reports that close a slot under the present view."""
        return self._durability(len(self.view))

    @property
    def committed_tokens(self) -> int:
        """Tokens that have entered the anchor, averaged over its fragments."""
        return self._fragment_tokens // max(1, len(self.bases))

    def steps_of(self, island: IslandId) -> int:
        """Inner steps of this island that have entered the anchor, averaged over its fragments."""
        return self._fragment_steps.get(island, 0) // max(1, len(self.bases))

    def fragment_of(self, round_: int) -> int:
        return round_ % len(self.bases)

    def check(self, closed: ClosedRecord) -> Record:
        """Decodes a record that this chain holds already, or that may follow its head.

        Raises InvariantBroken if it contradicts this chain (a fork), BadFrame if it is not certified.
        """
        record = decode_record(closed.record)
        if record.run_id != self.run_id:
            raise BadFrame(f"a record of run {record.run_id}, this is run {self.run_id}")
        if record.slot <= self.head_slot:
            self._same(record.slot, closed)
        elif record.slot != self.head_slot + 1 or record.previous != self.head_hash:
            raise InvariantBroken(
                f"E-LOG-FORK: record of slot {record.slot} does not follow slot {self.head_slot} here"
            )
        elif record.kind is SlotKind.GENESIS:
            self._checked_genesis(record)
        else:
            self._check_certificate(record, decode_certificate(closed.certificate))
        return record

    def append(self, closed: ClosedRecord) -> Record:
        """Checks and adds the next record; one that is there already changes nothing."""
        record = self.check(closed)
        if record.slot <= self.head_slot:
            return record
        if record.kind is SlotKind.GENESIS:
            self._open(record)
        else:
            self._apply(record)
        self.records.append(closed)
        self.head_hash = record_hash(closed.record)
        return record

    def _same(self, slot: int, closed: ClosedRecord) -> None:
        if self.records[slot].record != closed.record:
            raise InvariantBroken(f"E-LOG-FORK: slot {slot} is closed with another content here")

    def _checked_genesis(self, record: Record) -> tuple[Start, tuple[Member, ...]]:
        """Start state and first view, as the owner signed them."""
        signed = record.genesis
        if signed is None or record.slot != 0:
            raise BadFrame("a genesis record belongs to slot 0")
        if self._owner is not None and signed.signer != self._owner:
            raise BadFrame(f"genesis is signed by {short(signed.signer)}, not by the run's owner")
        genesis = decode_genesis(verified(signed, "genesis"))
        start = verified_start(genesis.start, signed.signer)
        if start.run_id != self.run_id:
            raise BadFrame(f"genesis of run {start.run_id}, this is run {self.run_id}")
        return start, genesis.view

    def _open(self, record: Record) -> None:
        self.start, self.view = self._checked_genesis(record)
        self.bases = [Base(0, root) for root in self.start.fragment_roots]

    def _check_certificate(self, record: Record, certificate: Certificate) -> None:
        plan = decode_plan(certificate.plan)
        votes = [decode_report(verified(s, "report")) for s in certificate.reports]
        signers = {s.signer for s in certificate.reports} & self.members
        outcome = votes[0].outcome if votes else (b"", b"")
        expected = record_for(plan, outcome, self.head_hash, self)
        pid = plan_id(certificate.plan)
        if plan.run_id != self.run_id or plan.view_slot != self.view_slot:
            raise BadFrame(f"record of slot {record.slot}: its plan is of another run or view")
        if plan.kind is SlotKind.COMMIT and (
            Base(plan.base_round, plan.base_root) != self.bases[self.fragment_of(plan.slot)]
        ):
            raise BadFrame(f"record of slot {record.slot}: its plan builds on another base")
        if len(signers) < self.durability or not all(
            vote.plan_id == pid and vote.outcome == outcome and reports_on(vote, plan)
            for vote in votes
        ):
            raise BadFrame(
                f"record of slot {record.slot}: {len(signers)} matching reports of members, "
                f"{self.durability} are needed"
            )
        if encode_record(expected) != encode_record(record):
            raise BadFrame(f"record of slot {record.slot} is not what its plan decides")

    def _apply(self, record: Record) -> None:
        self.finished = self.finished or record.kind is SlotKind.FINISH
        commit = record.commit
        if commit is None:
            return
        self.bases[commit.fragment] = Base(record.slot, commit.new_root)
        self._fragment_tokens += commit.tokens
        for p in commit.participants:
            self._fragment_steps[p.island] = self._fragment_steps.get(p.island, 0) + p.steps


def verified_start(signed: Signed, owner: IslandId) -> Start:
    """The owner-signed description of the start state."""
    if signed.signer != owner:
        raise BadFrame(
            f"the start state is signed by {short(signed.signer)}, not by the run's owner"
        )
    return decode_start(verified(signed, "start"))


def record_for(
    plan: Plan, outcome: tuple[Digest, Digest], previous: Digest, chain: Chain
) -> Record:
    """The record that closes `plan`'s slot when its reports agree on `outcome`.

    A function of content only: neither term nor attempt nor owners are part of it.
    """
    commit = None
    if plan.kind is SlotKind.COMMIT:
        commit = Commit(
            fragment=chain.fragment_of(plan.slot),
            base_round=plan.base_round,
            base_root=plan.base_root,
            reduced_root=outcome[0],
            new_root=outcome[1],
            revision=plan.revision,
            participants=plan.participants,
            residual_digest=plan.residual_digest,
        )
    return Record(chain.run_id, plan.slot, plan.kind, previous, None, commit)


def reports_on(report: Report, plan: Plan) -> bool:
    """The report speaks of this very plan, and of an outcome that a plan of its kind can have."""
    roots = report.reduced_root and report.new_root
    return (
        (report.run_id, report.ballot, report.slot) == (plan.run_id, plan.ballot, plan.slot)
        and (report.base_root, report.view_slot) == (plan.base_root, plan.view_slot)
        and bool(roots) == (plan.kind is SlotKind.COMMIT)
    )


def genesis_record(run_id: str, genesis: Signed) -> Record:
    return Record(run_id, 0, SlotKind.GENESIS, b"", genesis, None)


def matching(
    reports: Iterable[tuple[Signed, Report]], members: frozenset[IslandId]
) -> list[Signed]:
    """The largest set of reports by different members that agree on one outcome."""
    by_outcome: dict[tuple[Digest, Digest], dict[IslandId, Signed]] = {}
    for signed, report in reports:
        if signed.signer in members:
            by_outcome.setdefault(report.outcome, {})[signed.signer] = signed
    groups = sorted(by_outcome.values(), key=len, reverse=True)
    return [groups[0][island] for island in sorted(groups[0])] if groups else []
