"""What an island brings to a round: its pseudo-gradient, encoded once, cell by cell.

The root over (digest of the encoded cell, squared norm of the decoded cell) is fixed before anyone knows
who will reduce what, so a second plan needs no second encoding. Norms are claims: computed once here,
signed, checked by owners within a tolerance, never recomputed for equality.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from outer_optimizer.codec import Codec
from outer_optimizer.pseudo_gradient import pseudo_gradient, squared_norm
from outer_optimizer.rounding import round_to_bf16
from outer_optimizer.transform import FloatArray
from protocol.layout import Cell, Fragment
from protocol.merkle import DIGEST_BYTES, digest, leaf, root
from protocol.messages import Digest

LEAF_BYTES = DIGEST_BYTES + 8


@dataclass(frozen=True)
class Contribution:
    fragment: int
    cells: tuple[bytes, ...]
    leaf_contents: tuple[bytes, ...]
    squared_norms: tuple[float, ...]  # per tensor of the fragment
    tokens: int
    steps: int

    @cached_property
    def leaves(self) -> list[bytes]:
        return [leaf(content) for content in self.leaf_contents]

    @cached_property
    def root(self) -> Digest:
        return root(self.leaves)


def leaf_content(encoded: bytes | memoryview, norm: float) -> bytes:
    return digest(encoded) + struct.pack("<d", norm)


def split_leaf(content: bytes) -> tuple[Digest, float]:
    return content[:DIGEST_BYTES], struct.unpack("<d", content[DIGEST_BYTES:])[0]


def make_contribution(
    number: int,
    fragment: Fragment,
    codec: Codec,
    anchor: FloatArray,
    local: FloatArray,
    counts: tuple[int, int],
) -> Contribution:
    """`anchor` as handed out to the trainer, `local` as it wrote it; counts = (tokens, steps).

    A tensor narrower than fp32 was handed out rounded, and rounding is not training: the difference is
    taken to the rounded anchor.

    Raises NonFinite if the difference is not finite.
    """
    cells, contents = [], []
    norms = [0.0] * len(fragment.tensors)
    for cell in fragment.cells:
        at = slice(cell.start, cell.start + cell.values)
        delta = np.empty(cell.values, np.float32)
        pseudo_gradient(_as_handed_out(anchor[at], cell, fragment), local[at], delta)
        encoded = codec.encode(delta, cell.lengths)
        codec.decode(encoded, cell.lengths, delta)
        start = 0
        for tensor, values in cell.segments:
            norms[tensor] += squared_norm(delta[start : start + values])
            start += values
        cells.append(encoded)
        contents.append(leaf_content(encoded, squared_norm(delta)))
    return Contribution(number, tuple(cells), tuple(contents), tuple(norms), *counts)


def _as_handed_out(anchor: FloatArray, cell: Cell, fragment: Fragment) -> FloatArray:
    narrow = {i for i, _ in cell.segments if fragment.tensors[i].dtype == "bfloat16"}
    if not narrow:
        return anchor
    handed, start = anchor.copy(), 0
    for tensor, values in cell.segments:
        if tensor in narrow:
            round_to_bf16(handed[start : start + values])
        start += values
    return handed
