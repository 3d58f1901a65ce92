"""Bytes <-> messages, for everything that is signed, hashed or stored.

Decoding is the edge at which outside bytes are checked, once: sizes, digest lengths, enum values,
finite numbers. Beyond it the types hold. Every fault is one BadFrame line that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from protocol import atoll_records_pb2 as pb
from protocol.errors import BadFrame
from protocol.layout import TensorLayout
from protocol.merkle import DIGEST_BYTES, digest
from protocol.messages import (
    Ballot,
    Certificate,
    ClosedRecord,
    Commit,
    Digest,
    Genesis,
    IslandId,
    Member,
    Part,
    Participant,
    PartRoot,
    Plan,
    Ready,
    Record,
    Report,
    Signed,
    SlotKind,
    Start,
    Term,
)

MAX_TENSORS = 1_000_000
MAX_ISLANDS = 1_024
MAX_NAME_CHARS = 256

M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """Decodes one protobuf message; foreign bytes raise BadFrame."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise BadFrame(f"{kind.DESCRIPTOR.name}: {len(data)} bytes that do not decode") from None


def _digest(value: bytes, field: str, *, empty: bool = False) -> Digest:
    if len(value) == DIGEST_BYTES or (empty and not value):
        return value
    raise BadFrame(f"{field}: a digest has {DIGEST_BYTES} bytes, not {len(value)}")


def _island(value: bytes, field: str) -> IslandId:
    return IslandId(_digest(value, field))


def _finite(values: Iterable[float], field: str) -> tuple[float, ...]:
    checked = tuple(values)
    if not all(math.isfinite(v) and v >= 0 for v in checked):
        raise BadFrame(f"{field}: must be finite and not negative")
    return checked


def _bounded(count: int, most: int, field: str) -> None:
    if count > most:
        raise BadFrame(f"{field}: {count} entries, at most {most} are allowed")


def _kind(value: int, field: str) -> SlotKind:
    try:
        return SlotKind(value)
    except ValueError:
        raise BadFrame(f"{field}: unknown kind {value}") from None


# --- term, signed, member ----------------------------------------------------------------------


def term_to_pb(term: Term) -> pb.Term:
    return pb.Term(counter=term.counter, boot_id=term.boot_id)


def term_from_pb(m: pb.Term) -> Term:
    if len(m.boot_id) > DIGEST_BYTES:
        raise BadFrame("term.boot_id: too long")
    return Term(m.counter, m.boot_id)


def signed_to_pb(signed: Signed) -> pb.Signed:
    return pb.Signed(payload=signed.payload, signer=signed.signer, signature=signed.signature)


def signed_from_pb(m: pb.Signed) -> Signed:
    return Signed(m.payload, _island(m.signer, "signer"), m.signature)


def encode_signed(signed: Signed) -> bytes:
    return signed_to_pb(signed).SerializeToString()


def decode_signed(data: bytes) -> Signed:
    return signed_from_pb(parse(pb.Signed, data))


def member_to_pb(member: Member) -> pb.Member:
    return pb.Member(island=member.island, name=member.name)


def member_from_pb(m: pb.Member) -> Member:
    if not 0 < len(m.name) <= MAX_NAME_CHARS or not m.name.isprintable():
        raise BadFrame(f"member.name: {m.name[:40]!r} is not a printable name")
    return Member(_island(m.island, "member.island"), m.name)


# --- start and genesis -------------------------------------------------------------------------


def encode_start(start: Start) -> bytes:
    return pb.Start(
        run_id=start.run_id,
        spec_digest=start.spec_digest,
        layout=[pb.Tensor(name=t.name, shape=t.shape, dtype=t.dtype) for t in start.layout],
        fragment_roots=start.fragment_roots,
        tokenizer_digest=start.tokenizer_digest,
    ).SerializeToString()


def decode_start(data: bytes) -> Start:
    m = parse(pb.Start, data)
    _bounded(len(m.layout), MAX_TENSORS, "start.layout")
    return Start(
        m.run_id,
        _digest(m.spec_digest, "start.spec_digest"),
        tuple(TensorLayout(t.name, tuple(t.shape), t.dtype) for t in m.layout),
        tuple(_digest(r, "start.fragment_roots") for r in m.fragment_roots),
        _digest(m.tokenizer_digest, "start.tokenizer_digest", empty=True),
    )


def encode_genesis(genesis: Genesis) -> bytes:
    return pb.Genesis(
        start=signed_to_pb(genesis.start), view=[member_to_pb(m) for m in genesis.view]
    ).SerializeToString()


def decode_genesis(data: bytes) -> Genesis:
    m = parse(pb.Genesis, data)
    _bounded(len(m.view), MAX_ISLANDS, "genesis.view")
    return Genesis(signed_from_pb(m.start), tuple(member_from_pb(x) for x in m.view))


# --- ready, plan, part root, report ------------------------------------------------------------


def encode_ready(ready: Ready) -> bytes:
    return pb.Ready(**vars(ready)).SerializeToString()


def decode_ready(data: bytes) -> Ready:
    m = parse(pb.Ready, data)
    _bounded(len(m.squared_norms), MAX_TENSORS, "ready.squared_norms")
    (up_bps,) = _finite([m.up_bps], "ready.up_bps")
    return Ready(
        run_id=m.run_id,
        round=m.round,
        base_round=m.base_round,
        base_root=_digest(m.base_root, "ready.base_root"),
        revision=m.revision,
        root=_digest(m.root, "ready.root"),
        tokens=m.tokens,
        steps=m.steps,
        up_bps=up_bps,
        squared_norms=_finite(m.squared_norms, "ready.squared_norms"),
    )


def _participants_to_pb(participants: Iterable[Participant]) -> list[pb.Participant]:
    return [pb.Participant(**p._asdict()) for p in participants]


def _participants_from_pb(many: Iterable[pb.Participant]) -> tuple[Participant, ...]:
    participants = tuple(
        Participant(
            _island(p.island, "participant.island"),
            _digest(p.root, "participant.root"),
            _finite([p.weight], "participant.weight")[0],
            p.tokens,
            p.steps,
        )
        for p in many
    )
    _bounded(len(participants), MAX_ISLANDS, "participants")
    islands = [p.island for p in participants]
    if islands != sorted(set(islands)):
        raise BadFrame("participants: must be sorted by island, each once")
    return participants


def encode_plan(plan: Plan) -> bytes:
    return pb.Plan(
        run_id=plan.run_id,
        term=term_to_pb(plan.ballot.term),
        attempt=plan.ballot.attempt,
        slot=plan.slot,
        kind=pb.SlotKind.ValueType(plan.kind),
        view_slot=plan.view_slot,
        base_round=plan.base_round,
        base_root=plan.base_root,
        revision=plan.revision,
        participants=_participants_to_pb(plan.participants),
        parts=[pb.Part(**part._asdict()) for part in plan.parts],
        residual_digest=plan.residual_digest,
        budget_s=plan.budget_s,
    ).SerializeToString()


def decode_plan(data: bytes) -> Plan:
    m = parse(pb.Plan, data)
    _bounded(len(m.parts), MAX_ISLANDS, "plan.parts")
    return Plan(
        run_id=m.run_id,
        ballot=Ballot(term_from_pb(m.term), m.attempt),
        slot=m.slot,
        kind=_kind(m.kind, "plan.kind"),
        view_slot=m.view_slot,
        base_round=m.base_round,
        base_root=_digest(m.base_root, "plan.base_root", empty=True),
        revision=m.revision,
        participants=_participants_from_pb(m.participants),
        parts=tuple(Part(_island(p.owner, "part.owner"), p.first_cell, p.cells) for p in m.parts),
        residual_digest=_digest(m.residual_digest, "plan.residual_digest", empty=True),
        budget_s=_finite([m.budget_s], "plan.budget_s")[0],
    )


def plan_id(plan_bytes: bytes) -> Digest:
    return digest(b"plan\0" + plan_bytes)


def encode_part_root(part: PartRoot) -> bytes:
    return pb.PartRoot(**vars(part)).SerializeToString()


def decode_part_root(data: bytes) -> PartRoot:
    m = parse(pb.PartRoot, data)
    _bounded(len(m.squared_norms), MAX_TENSORS, "part_root.squared_norms")
    return PartRoot(
        run_id=m.run_id,
        plan_id=_digest(m.plan_id, "part_root.plan_id"),
        first_cell=m.first_cell,
        cells=m.cells,
        root=_digest(m.root, "part_root.root"),
        residual_before=_digest(m.residual_before, "part_root.residual_before", empty=True),
        residual_after=_digest(m.residual_after, "part_root.residual_after", empty=True),
        squared_norms=_finite(m.squared_norms, "part_root.squared_norms"),
    )


def encode_report(report: Report) -> bytes:
    return pb.Report(
        run_id=report.run_id,
        term=term_to_pb(report.ballot.term),
        attempt=report.ballot.attempt,
        slot=report.slot,
        plan_id=report.plan_id,
        base_root=report.base_root,
        reduced_root=report.reduced_root,
        new_root=report.new_root,
        view_slot=report.view_slot,
    ).SerializeToString()


def decode_report(data: bytes) -> Report:
    m = parse(pb.Report, data)
    return Report(
        run_id=m.run_id,
        ballot=Ballot(term_from_pb(m.term), m.attempt),
        slot=m.slot,
        plan_id=_digest(m.plan_id, "report.plan_id"),
        base_root=_digest(m.base_root, "report.base_root", empty=True),
        reduced_root=_digest(m.reduced_root, "report.reduced_root", empty=True),
        new_root=_digest(m.new_root, "report.new_root", empty=True),
        view_slot=m.view_slot,
    )


# --- the log -----------------------------------------------------------------------------------


def _commit_to_pb(commit: Commit) -> pb.Commit:
    fields = dict(vars(commit), participants=_participants_to_pb(commit.participants))
    return pb.Commit(**fields)


def _commit_from_pb(m: pb.Commit) -> Commit:
    return Commit(
        fragment=m.fragment,
        base_round=m.base_round,
        base_root=_digest(m.base_root, "commit.base_root"),
        reduced_root=_digest(m.reduced_root, "commit.reduced_root"),
        new_root=_digest(m.new_root, "commit.new_root"),
        revision=m.revision,
        participants=_participants_from_pb(m.participants),
        residual_digest=_digest(m.residual_digest, "commit.residual_digest", empty=True),
    )


def encode_record(record: Record) -> bytes:
    return pb.Record(
        run_id=record.run_id,
        slot=record.slot,
        kind=pb.SlotKind.ValueType(record.kind),
        previous=record.previous,
        genesis=signed_to_pb(record.genesis) if record.genesis else None,
        commit=_commit_to_pb(record.commit) if record.commit else None,
    ).SerializeToString()


def decode_record(data: bytes) -> Record:
    m = parse(pb.Record, data)
    kind = _kind(m.kind, "record.kind")
    if (kind is SlotKind.GENESIS) != m.HasField("genesis") or (
        kind is SlotKind.COMMIT
    ) != m.HasField("commit"):
        raise BadFrame(f"record of slot {m.slot}: the body does not fit kind {kind.name}")
    return Record(
        run_id=m.run_id,
        slot=m.slot,
        kind=kind,
        previous=_digest(m.previous, "record.previous", empty=kind is SlotKind.GENESIS),
        genesis=signed_from_pb(m.genesis) if m.HasField("genesis") else None,
        commit=_commit_from_pb(m.commit) if m.HasField("commit") else None,
    )


def record_hash(record_bytes: bytes) -> Digest:
    return digest(b"record\0" + record_bytes)


def encode_certificate(certificate: Certificate) -> bytes:
    return pb.Certificate(
        plan=certificate.plan, reports=[signed_to_pb(r) for r in certificate.reports]
    ).SerializeToString()


def decode_certificate(data: bytes) -> Certificate:
    m = parse(pb.Certificate, data)
    _bounded(len(m.reports), MAX_ISLANDS, "certificate.reports")
    return Certificate(m.plan, tuple(signed_from_pb(r) for r in m.reports))


def closed_to_pb(closed: ClosedRecord) -> pb.ClosedRecord:
    return pb.ClosedRecord(record=closed.record, certificate=closed.certificate)


def closed_from_pb(m: pb.ClosedRecord) -> ClosedRecord:
    return ClosedRecord(m.record, m.certificate)
