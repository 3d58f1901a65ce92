"""Bytes and messages: every message survives the wire, and foreign bytes end in one BadFrame line."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import atoll_records_pb2 as pb
from protocol import wire
from protocol.errors import BadFrame
from protocol.frames import MAX_CHUNK_BYTES, FrameKind, decode_frame, encode_frame
from protocol.identity import Identity, verified
from protocol.layout import TensorLayout
from protocol.messages import (
    NO_TERM,
    Ballot,
    Certificate,
    ClosedRecord,
    Commit,
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

D = b"d" * 32

# --- any message -------------------------------------------------------------------------------

digests = st.binary(min_size=32, max_size=32)
maybe_digests = st.one_of(st.just(b""), digests)
islands = digests.map(IslandId)
counts = st.integers(0, (1 << 64) - 1)
cells = st.integers(0, (1 << 32) - 1)
rounds = st.integers(0, (1 << 63) - 1)
texts = st.text(max_size=8)
norms = st.lists(st.floats(0, allow_nan=False, allow_infinity=False), max_size=4).map(tuple)
amounts = st.floats(0, allow_nan=False, allow_infinity=False)
weights = st.floats(0, 1, width=32)
terms = st.builds(Term, counts, st.binary(max_size=32))
ballots = st.builds(Ballot, terms, cells)
signeds = st.builds(Signed, st.binary(max_size=40), islands, st.binary(max_size=64))
names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
participants = st.lists(
    st.builds(Participant, islands, digests, weights, counts, counts),
    max_size=3,
    unique_by=lambda p: p.island,
).map(lambda many: tuple(sorted(many, key=lambda p: p.island)))
parts = st.lists(st.builds(Part, islands, cells, cells), max_size=3).map(tuple)
tensors = st.builds(TensorLayout, texts, st.lists(counts, max_size=3).map(tuple), texts)
members = st.builds(Member, islands, names)

starts = st.builds(
    Start,
    texts,
    digests,
    st.lists(tensors, max_size=3).map(tuple),
    st.lists(digests, max_size=3).map(tuple),
    maybe_digests,
)
geneses = st.builds(Genesis, signeds, st.lists(members, max_size=3).map(tuple))
readies = st.builds(
    Ready, texts, counts, rounds, digests, counts, digests, counts, counts, amounts, norms
)
plans = st.builds(
    Plan, texts, ballots, counts, st.sampled_from(SlotKind), counts, rounds, maybe_digests,
    counts, participants, parts, maybe_digests, amounts,
)  # fmt: skip
part_roots = st.builds(
    PartRoot, texts, digests, cells, cells, digests, maybe_digests, maybe_digests, norms
)
reports = st.builds(
    Report, texts, ballots, counts, digests, maybe_digests, maybe_digests, maybe_digests, counts
)
commits = st.builds(
    Commit, cells, rounds, digests, digests, digests, counts, participants, maybe_digests
)
records = st.one_of(
    st.builds(Record, texts, counts, st.just(SlotKind.GENESIS), maybe_digests, signeds),
    st.builds(Record, texts, counts, st.just(SlotKind.COMMIT), digests, st.none(), commits),
    st.builds(Record, texts, counts, st.sampled_from([SlotKind.VOID, SlotKind.FINISH]), digests),
)
certificates = st.builds(
    Certificate, st.binary(max_size=40), st.lists(signeds, max_size=3).map(tuple)
)

KINDS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "signed": (signeds, wire.encode_signed, wire.decode_signed),
    "start": (starts, wire.encode_start, wire.decode_start),
    "genesis": (geneses, wire.encode_genesis, wire.decode_genesis),
    "ready": (readies, wire.encode_ready, wire.decode_ready),
    "plan": (plans, wire.encode_plan, wire.decode_plan),
    "part_root": (part_roots, wire.encode_part_root, wire.decode_part_root),
    "report": (reports, wire.encode_report, wire.decode_report),
    "record": (records, wire.encode_record, wire.decode_record),
    "certificate": (certificates, wire.encode_certificate, wire.decode_certificate),
}
every_kind = pytest.mark.parametrize("kind", sorted(KINDS))


@every_kind
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_message_comes_back_equal_and_encodes_to_the_same_bytes(
    kind: str, data: st.DataObject
) -> None:
    strategy, encode, decode = KINDS[kind]
    message = data.draw(strategy)
    assert decode(encode(message)) == message
    assert encode(decode(encode(message))) == encode(message)


@every_kind
@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=200))
def test_foreign_bytes_raise_bad_frame_and_nothing_else(kind: str, data: bytes) -> None:
    with suppress(BadFrame):
        KINDS[kind][2](data)


@every_kind
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damaged_bytes_raise_bad_frame_or_decode_to_what_can_be_encoded_again(
    kind: str, data: st.DataObject
) -> None:
    strategy, encode, decode = KINDS[kind]
    damaged = bytearray(encode(data.draw(strategy)))
    del damaged[data.draw(st.integers(0, len(damaged))) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            place = data.draw(st.integers(0, len(damaged) - 1))
            damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(BadFrame):
        message = decode(bytes(damaged))
        assert decode(encode(message)) == message


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(terms, st.just(NO_TERM)),
    members,
    st.builds(ClosedRecord, st.binary(max_size=9), st.binary(max_size=9)),
)
def test_terms_members_and_closed_records_come_back_equal(
    term: Term, member: Member, closed: ClosedRecord
) -> None:
    assert wire.term_from_pb(wire.term_to_pb(term)) == term
    assert wire.member_from_pb(wire.member_to_pb(member)) == member
    assert wire.closed_from_pb(wire.closed_to_pb(closed)) == closed


# --- limits ------------------------------------------------------------------------------------


def plan_message(**changed: Any) -> bytes:
    fields: dict[str, Any] = {
        "run_id": "run", "slot": 1, "kind": SlotKind.COMMIT, "base_root": D, "budget_s": 1.0
    }  # fmt: skip
    return pb.Plan(**(fields | changed)).SerializeToString()


def ready_message(**changed: Any) -> bytes:
    fields: dict[str, Any] = {"run_id": "run", "round": 1, "base_root": D, "root": D}
    return pb.Ready(**(fields | changed)).SerializeToString()


def participant(island: bytes = D, root: bytes = D, weight: float = 0.5) -> pb.Participant:
    return pb.Participant(island=island, root=root, weight=weight)


def test_participants_are_sorted_and_each_stands_once() -> None:
    a, b = b"a" * 32, b"b" * 32
    wire.decode_plan(plan_message(participants=[participant(a), participant(b)]))
    for many in ([b, a], [a, a]):
        with pytest.raises(BadFrame, match="participants: must be sorted by island, each once"):
            wire.decode_plan(plan_message(participants=[participant(i) for i in many]))


@pytest.mark.parametrize("bad", [b"", b"d" * 31, b"d" * 33])
def test_a_digest_or_key_of_another_length_is_named(bad: bytes) -> None:
    with pytest.raises(BadFrame, match=r"participant\.island: a digest has 32 bytes"):
        wire.decode_plan(plan_message(participants=[participant(island=bad)]))
    with pytest.raises(BadFrame, match=r"participant\.root"):
        wire.decode_plan(plan_message(participants=[participant(root=bad)]))
    with pytest.raises(BadFrame, match=r"part\.owner"):
        wire.decode_plan(plan_message(parts=[pb.Part(owner=bad)]))
    with pytest.raises(BadFrame, match=r"ready\.root"):
        wire.decode_ready(ready_message(root=bad))
    with pytest.raises(BadFrame, match=r"ready\.base_root"):
        wire.decode_ready(ready_message(base_root=bad))
    with pytest.raises(BadFrame, match=r"report\.plan_id"):
        wire.decode_report(pb.Report(plan_id=bad).SerializeToString())
    with pytest.raises(BadFrame, match="signer"):
        wire.decode_signed(pb.Signed(signer=bad).SerializeToString())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, -1e-30])
def test_numbers_that_are_not_finite_or_negative_are_named(bad: float) -> None:
    with pytest.raises(BadFrame, match=r"plan\.budget_s: must be finite and not negative"):
        wire.decode_plan(plan_message(budget_s=bad))
    with pytest.raises(BadFrame, match=r"participant\.weight"):
        wire.decode_plan(plan_message(participants=[participant(weight=bad)]))
    with pytest.raises(BadFrame, match=r"ready\.up_bps"):
        wire.decode_ready(ready_message(up_bps=bad))
    with pytest.raises(BadFrame, match=r"ready\.squared_norms"):
        wire.decode_ready(ready_message(squared_norms=[1.0, bad]))
    part_root = pb.PartRoot(plan_id=D, root=D, squared_norms=[bad])
    with pytest.raises(BadFrame, match=r"part_root\.squared_norms"):
        wire.decode_part_root(part_root.SerializeToString())


def test_too_many_entries_are_refused_with_the_limit() -> None:
    too_many = wire.MAX_ISLANDS + 1
    islands_ = [n.to_bytes(32, "big") for n in range(too_many)]
    for field, data, decode in (
        ("participants", plan_message(participants=map(participant, islands_)), wire.decode_plan),
        ("plan.parts", plan_message(parts=[pb.Part(owner=D)] * too_many), wire.decode_plan),
        (
            "genesis.view",
            pb.Genesis(view=[pb.Member(island=D, name="a")] * too_many).SerializeToString(),
            wire.decode_genesis,
        ),
        (
            "certificate.reports",
            pb.Certificate(reports=[pb.Signed(signer=D)] * too_many).SerializeToString(),
            wire.decode_certificate,
        ),
    ):
        with pytest.raises(BadFrame, match=f"{field}: 1025 entries, at most 1024 are allowed"):
            decode(data)
    norms_ = ready_message(squared_norms=[0.0] * (wire.MAX_TENSORS + 1))
    with pytest.raises(BadFrame, match=r"ready\.squared_norms: 1000001 entries"):
        wire.decode_ready(norms_)


@pytest.mark.parametrize("kind", [0, 5, 99])
def test_an_unknown_kind_of_slot_is_refused(kind: Any) -> None:
    with pytest.raises(BadFrame, match=f"plan.kind: unknown kind {kind}"):
        wire.decode_plan(plan_message(kind=kind))


def test_the_body_of_a_record_fits_its_kind() -> None:
    signed = pb.Signed(signer=D)
    commit = pb.Commit(base_root=D, reduced_root=D, new_root=D)
    for record in (
        pb.Record(kind=pb.SLOT_KIND_GENESIS, previous=D),
        pb.Record(kind=pb.SLOT_KIND_COMMIT, previous=D, genesis=signed),
        pb.Record(kind=pb.SLOT_KIND_VOID, previous=D, commit=commit),
        pb.Record(kind=pb.SLOT_KIND_FINISH, previous=D, genesis=signed),
    ):
        with pytest.raises(BadFrame, match="the body does not fit kind"):
            wire.decode_record(record.SerializeToString())
    with pytest.raises(BadFrame, match=r"record\.previous"):
        wire.decode_record(pb.Record(kind=pb.SLOT_KIND_VOID).SerializeToString())


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[31m", "x" * 257])
def test_a_name_is_short_and_printable(name: str) -> None:
    with pytest.raises(BadFrame, match=r"member\.name"):
        wire.member_from_pb(pb.Member(island=D, name=name))


def test_a_boot_id_has_a_limit() -> None:
    with pytest.raises(BadFrame, match=r"term\.boot_id"):
        wire.term_from_pb(pb.Term(boot_id=b"x" * 33))


@given(st.binary(max_size=40))
def test_plan_ids_and_record_hashes_never_meet(data: bytes) -> None:
    assert wire.plan_id(data) != wire.record_hash(data)


# --- signatures --------------------------------------------------------------------------------

SIGNER, OTHER = Identity(b"one".ljust(32)), Identity(b"two".ljust(32))


def test_a_signature_holds_for_its_own_domain_payload_and_signer_only() -> None:
    signed = SIGNER.sign("ready", b"payload")
    assert verified(signed, "ready") == b"payload"
    assert verified(wire.decode_signed(wire.encode_signed(signed)), "ready") == b"payload"
    for false, domain in (
        (signed, "report"),
        (Signed(b"payloae", signed.signer, signed.signature), "ready"),
        (Signed(b"payload", OTHER.island, signed.signature), "ready"),
        (Signed(b"payload", signed.signer, signed.signature[:-1]), "ready"),
        (Signed(b"payload", signed.signer, b""), "ready"),
        (Signed(b"payload", IslandId(b"\xff" * 32), signed.signature), "ready"),
    ):
        with pytest.raises(BadFrame, match=f"a {domain} with a wrong signature"):
            verified(false, domain)


def test_domain_and_payload_cannot_run_into_each_other() -> None:
    for payload in (b"-root\0payload", b"-rootpayload"):
        signed = SIGNER.sign("part", payload)
        with pytest.raises(BadFrame):
            verified(Signed(b"payload", signed.signer, signed.signature), "part-root")


# --- frames ------------------------------------------------------------------------------------


EMPTY = (FrameKind.CREDIT, FrameKind.END, FrameKind.MISSING)


@given(st.sampled_from(FrameKind), st.binary(max_size=64), digests, cells, cells)
def test_every_frame_comes_back_equal(
    kind: FrameKind, payload: bytes, plan: bytes, first_cell: int, count: int
) -> None:
    payload = b"" if kind in EMPTY else payload
    data = encode_frame(kind, payload, plan_id=plan, first_cell=first_cell, cells=count)
    assert len(data) == 48 + len(payload)
    assert decode_frame(data) == (kind, plan, first_cell, count, payload)


def test_a_frame_carries_a_whole_chunk() -> None:
    chunk = bytes(MAX_CHUNK_BYTES)
    assert decode_frame(encode_frame(FrameKind.CELLS, memoryview(chunk))).payload == chunk


@pytest.mark.parametrize("kind", FrameKind)
def test_a_chunk_above_one_mebibyte_is_refused_whatever_cells_it_carries(kind: FrameKind) -> None:
    data = encode_frame(kind, bytes(MAX_CHUNK_BYTES + 1))
    if kind in (FrameKind.CELLS, FrameKind.REDUCED, FrameKind.STATE):
        with pytest.raises(BadFrame, match="a chunk of 1048577 bytes, at most 1048576 are allowed"):
            decode_frame(data)
    elif kind not in EMPTY:
        assert decode_frame(data).kind is kind


@pytest.mark.parametrize("kind", EMPTY)
def test_a_frame_that_says_all_by_its_kind_carries_nothing(kind: FrameKind) -> None:
    assert decode_frame(encode_frame(kind)).payload == b""
    with pytest.raises(BadFrame, match="a frame of this kind carries nothing"):
        decode_frame(encode_frame(kind, b"x"))


@given(st.binary(max_size=100))
def test_foreign_bytes_are_no_frame(data: bytes) -> None:
    with suppress(BadFrame):
        decode_frame(data)


def test_a_damaged_frame_is_refused_with_the_reason() -> None:
    good = encode_frame(FrameKind.CELLS, b"payload")
    for bad, match in (
        (b"", "a frame of 0 bytes is shorter than its header"),
        (good[:47], "a frame of 47 bytes is shorter"),
        (good[:-1], "says 7 payload bytes and has 6"),
        (good + b"x", "says 7 payload bytes and has 8"),
        (b"Bt" + good[2:], "not an Atoll frame of version 1"),
        (good[:2] + b"\2" + good[3:], "not an Atoll frame of version 1"),
        (good[:3] + b"\0" + good[4:], "unknown frame kind 0"),
        (good[:3] + b"\x63" + good[4:], "unknown frame kind 99"),
    ):
        with pytest.raises(BadFrame, match=match):
            decode_frame(bad)
