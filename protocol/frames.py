"""Tensor bytes on the wire: a fixed 48-byte header, then raw payload of at most 1 MiB.

A chunk carries whole cells. How many bytes a cell has follows from the receiver's own layout and codec,
never from the sender's word; the header only names which cells these are and which plan they belong to.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from protocol.errors import BadFrame
from protocol.merkle import DIGEST_BYTES

MAX_CHUNK_BYTES = 1 << 20
# One number for both ends and all roles: the largest message of any kind, tensors or control.
MAX_MESSAGE_BYTES = 16 << 20

_HEADER = struct.Struct("<2sBB32sIII")
_MAGIC = b"At"
_NO_PLAN = bytes(DIGEST_BYTES)


class FrameKind(IntEnum):
    HELLO = 1  # first frame of a stream: who is speaking
    CREDIT = 2  # owner -> participant: you may send these cells of your contribution
    LEAVES = 3  # participant -> owner: leaves of the part, then the proof
    CELLS = 4  # participant -> owner: encoded cells of the contribution
    REDUCED = 5  # owner -> everyone: encoded cells of the sum
    PART_ROOT = 6  # owner -> everyone: signed root of its part, after its cells
    STATE = 7  # donor -> joiner: anchor cells, fp32
    END = 8  # nothing more will come on this stream
    MISSING = 9  # the other side does not hold what was asked for


_EMPTY = frozenset({FrameKind.CREDIT, FrameKind.END, FrameKind.MISSING})
_CELLS = frozenset({FrameKind.CELLS, FrameKind.REDUCED, FrameKind.STATE})


class Frame(NamedTuple):
    kind: FrameKind
    plan_id: bytes
    first_cell: int
    cells: int
    payload: bytes | memoryview


def encode_frame(
    kind: FrameKind,
    payload: bytes | memoryview = b"",
    *,
    plan_id: bytes = _NO_PLAN,
    first_cell: int = 0,
    cells: int = 0,
) -> bytes:
    header = _HEADER.pack(_MAGIC, 1, kind, plan_id, first_cell, cells, len(payload))
    return b"".join((header, payload))


def decode_frame(data: bytes) -> Frame:
    """Raises BadFrame on anything that is not a frame of this version."""
    if len(data) < _HEADER.size:
        raise BadFrame(f"a frame of {len(data)} bytes is shorter than its header")
    magic, version, kind, plan_id, first_cell, cells, size = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != 1:
        raise BadFrame("not an Atoll frame of version 1")
    if size != len(data) - _HEADER.size:
        raise BadFrame(f"a frame says {size} payload bytes and has {len(data) - _HEADER.size}")
    if kind in _CELLS and size > MAX_CHUNK_BYTES:
        raise BadFrame(f"a chunk of {size} bytes, at most {MAX_CHUNK_BYTES} are allowed")
    if kind in _EMPTY and size:
        raise BadFrame("a frame of this kind carries nothing")
    try:
        return Frame(FrameKind(kind), plan_id, first_cell, cells, memoryview(data)[_HEADER.size :])
    except ValueError:
        raise BadFrame(f"unknown frame kind {kind}") from None
