"""What peers say to each other, as frozen values; bytes are the business of `wire.py`.

Numbers: slot 0 is genesis; round r is decided in slot r, so rounds count from 1. `base_round` is the last
committed round of the fragment, 0 = the start state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, NewType

from protocol.layout import TensorLayout

IslandId = NewType("IslandId", bytes)  # Ed25519 public key, 32 bytes
Digest = bytes


class Term(NamedTuple):
    """Incarnation of a coordinator: compared as (counter, boot id)."""

    counter: int
    boot_id: bytes


NO_TERM = Term(0, b"")


class Ballot(NamedTuple):
    term: Term
    attempt: int


class SlotKind(IntEnum):
    GENESIS = 1
    COMMIT = 2
    VOID = 3
    FINISH = 4


class Member(NamedTuple):
    island: IslandId
    name: str


class Endpoint(NamedTuple):
    """An address that serves `cells` cells from `first_cell` on; cells 0 = all."""

    address: str
    first_cell: int = 0
    cells: int = 0


@dataclass(frozen=True)
class Signed:
    """The exact bytes that were signed. The domain (kind of payload) is part of the signature."""

    payload: bytes
    signer: IslandId
    signature: bytes


@dataclass(frozen=True)
class Start:
    """The run's beginning, made once by its creator: layout and roots of the start state."""

    run_id: str
    spec_digest: Digest
    layout: tuple[TensorLayout, ...]
    fragment_roots: tuple[Digest, ...]
    tokenizer_digest: Digest


@dataclass(frozen=True)
class Genesis:
    start: Signed
    view: tuple[Member, ...]


@dataclass(frozen=True)
class Ready:
    """An island's claim on a round: the root fixes its contribution before owners are known."""

    run_id: str
    round: int
    base_round: int
    base_root: Digest
    revision: int
    root: Digest
    tokens: int
    steps: int
    up_bps: float
    squared_norms: tuple[float, ...]


class Participant(NamedTuple):
    island: IslandId
    root: Digest
    weight: float
    tokens: int
    steps: int


class Part(NamedTuple):
    owner: IslandId
    first_cell: int
    cells: int

    @property
    def stop_cell(self) -> int:
        return self.first_cell + self.cells


@dataclass(frozen=True)
class Plan:
    """The decision on a slot. Its plan_id is the digest of its exact bytes (`wire.plan_id`)."""

    run_id: str
    ballot: Ballot
    slot: int
    kind: SlotKind
    view_slot: int
    base_round: int
    base_root: Digest
    revision: int
    participants: tuple[Participant, ...]
    parts: tuple[Part, ...]
    residual_digest: Digest
    budget_s: float

    @property
    def pairs(self) -> tuple[tuple[IslandId, Digest], ...]:
        """What the slot would record: who takes part, with which contribution."""
        return tuple((p.island, p.root) for p in self.participants)

    def participant(self, island: IslandId) -> Participant | None:
        return next((p for p in self.participants if p.island == island), None)


@dataclass(frozen=True)
class PartRoot:
    run_id: str
    plan_id: Digest
    first_cell: int
    cells: int
    root: Digest
    residual_before: Digest
    residual_after: Digest
    squared_norms: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """A vote: all reduced cells are on this island's disk, and they lead to `new_root`."""

    run_id: str
    ballot: Ballot
    slot: int
    plan_id: Digest
    base_root: Digest
    reduced_root: Digest
    new_root: Digest
    view_slot: int

    @property
    def outcome(self) -> tuple[Digest, Digest]:
        return self.reduced_root, self.new_root


@dataclass(frozen=True)
class Commit:
    fragment: int
    base_round: int
    base_root: Digest
    reduced_root: Digest
    new_root: Digest
    revision: int
    participants: tuple[Participant, ...]
    residual_digest: Digest

    @property
    def tokens(self) -> int:
        return sum(p.tokens for p in self.participants)

    def participant(self, island: IslandId) -> Participant | None:
        return next((p for p in self.participants if p.island == island), None)


@dataclass(frozen=True)
class Record:
    """One link of the chain. `genesis` is set for slot 0, `commit` for committed rounds."""

    run_id: str
    slot: int
    kind: SlotKind
    previous: Digest
    genesis: Signed | None = None
    commit: Commit | None = None


@dataclass(frozen=True)
class ClosedRecord:
    """The exact bytes of a record and of the certificate that decided it (empty for genesis)."""

    record: bytes
    certificate: bytes


@dataclass(frozen=True)
class Certificate:
    plan: bytes
    reports: tuple[Signed, ...]
