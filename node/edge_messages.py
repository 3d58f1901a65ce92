"""What trainer and daemon say to each other: one JSON object per line, told apart by its key "type".

    trainer                                  daemon
    Hello(layout)                     ->
                                      <-     Welcome + file descriptors   or   Refused
    Follow (every other rank)         ->
                                      <-     Buffers + file descriptors
    Boundary (every edge step)        ->
                                      <-     Apply   or   GoOn   or   Stop
    Applied, Evaluation               ->     (after an Apply; Evaluation when it was asked for)

Rank 0 speaks for the island's ranks; the others connect once, for the shared memory. Tensors never
travel here: their descriptors come with Welcome and Buffers, in the order snapshot, anchor slot 0, anchor
slot 1 of fragment 0, then of fragment 1, ... The edge is known one ahead: every answer names the next edge
step and the fragment that is due there. An edge step is a count of island steps done; round numbers are
the daemon's, the trainer only hands them back.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json

from protocol.layout import TensorLayout

MAX_LINE_BYTES = 16 << 20

Reference = Literal["snapshot", "anchor", "reset"]


@dataclass(frozen=True)
class Hello:
    """`incarnation` names this life of the trainer; `layout` is what its ranks hold, all together.

    `peak_flops` is of all ranks together, None where it is not known.
    """

    incarnation: str
    pid: int
    layout: tuple[TensorLayout, ...]
    ranks: int = 1
    flops_per_token: float = 0.0
    peak_flops: float | None = None


@dataclass(frozen=True)
class Follow:
    """From every rank but the first: asks for the buffers that came with this incarnation's Welcome."""

    rank: int
    incarnation: str


@dataclass(frozen=True)
class Boundary:
    """The snapshot of `fragment` is written.

    `step` counts the island's steps, all incarnations together; `tokens`, `steps`, `compute_s` and
    `wait_s` are totals of this incarnation. `loss` is the last step's, None if it is not finite.
    `rank_s` is each rank's time since the last edge, `seconds` what the loop spent on what, `skipped`
    its steps whose gradient was not finite: totals too.
    """

    sequence: int
    incarnation: str
    fragment: int
    step: int
    tokens: int
    steps: int
    loss: float | None
    compute_s: float
    wait_s: float
    rank_s: tuple[float, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    skipped: int = 0


@dataclass(frozen=True)
class Applied:
    fragment: int
    round: int
    sequence: int


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss on the anchor of `round`."""

    round: int
    loss: float


@dataclass(frozen=True)
class TensorSlot:
    """Where a tensor lies in its fragment's flat vector."""

    name: str
    offset: int
    values: int


@dataclass(frozen=True)
class FragmentLayout:
    values: int
    tensors: tuple[TensorSlot, ...]


@dataclass(frozen=True)
class Welcome:
    """`first_step` = island steps done before this incarnation; `anchor_slot` = one per fragment.

    `index` = this island's place among `islands`. The last three rule the learning rate.
    """

    fragments: tuple[FragmentLayout, ...]
    anchor_slot: tuple[int, ...]
    round: int
    first_step: int
    next_edge_step: int
    next_fragment: int
    committed_tokens: int
    islands: int
    index: int
    evaluate: bool
    warmup_tokens: int
    target_tokens: int
    min_lr_ratio: float


@dataclass(frozen=True)
class Buffers:
    """Answers Follow; `count` file descriptors come along, in Welcome's order."""

    count: int


@dataclass(frozen=True)
class Apply:
    """The new anchor lies in `anchor_slot`: local += new anchor - `ref`; "reset": local = new anchor."""

    sequence: int
    fragment: int
    round: int
    ref: Reference
    anchor_slot: int
    next_edge_step: int
    next_fragment: int
    committed_tokens: int
    islands: int
    evaluate: bool
    last: bool


@dataclass(frozen=True)
class GoOn:
    """Nothing to apply: train on to the next edge."""

    sequence: int
    next_edge_step: int
    next_fragment: int


@dataclass(frozen=True)
class Refused:
    reason: str


@dataclass(frozen=True)
class Stop:
    reason: str


Message = (
    Hello
    | Follow
    | Boundary
    | Applied
    | Evaluation
    | Welcome
    | Buffers
    | Apply
    | GoOn
    | Refused
    | Stop
)

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_CHECKS = {
    kind.__name__: TypeAdapter[Message](with_config(_STRICT)(kind)) for kind in get_args(Message)
}


def encode(message: Message) -> bytes:
    """One line, newline included. Raises ValueError if it is longer than MAX_LINE_BYTES."""
    fields = {"type": type(message).__name__, **asdict(message)}
    line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"a message of {len(line)} bytes is longer than {MAX_LINE_BYTES}")
    return line


def decode(line: bytes) -> Message:
    """The inverse of `encode`. Raises ValueError with one line on whatever is not a message."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"a message of {len(line)} bytes is longer than {MAX_LINE_BYTES}")
    try:
        fields = from_json(line)
    except ValueError as error:
        raise ValueError(f"not a JSON line: {error}") from None
    kind = str(fields.pop("type", None)) if isinstance(fields, dict) else "none"
    if kind not in _CHECKS:
        raise ValueError(f"unknown message type {kind!r}")
    try:
        return _CHECKS[kind].validate_json(json.dumps(fields))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in fault["loc"])
        raise ValueError(f"{kind}: {key}: {fault['msg']}") from None
