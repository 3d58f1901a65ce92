"""How a cell travels. A codec is pure: values -> bytes -> values, the size known beforehand.

A cell is a run of segments, pieces of different tensors; blocks restart at each, so no scale is shared by
two tensors. Both directions of a round use the same codec, and everybody, the owner of a part too, goes on
with the decoded bytes.

Invariants: `encode` gives the same bytes on every CPU and `decode` the same values; there and back twice
is the same as once, bit for bit.
"""

from __future__ import annotations

from typing import Protocol

from outer_optimizer.codec_bf16 import Bf16
from outer_optimizer.codec_fp32 import Fp32
from outer_optimizer.codec_int8 import Int8
from outer_optimizer.encoding import Segments
from outer_optimizer.transform import FloatArray


class Codec(Protocol):
    name: str

    def encoded_bytes(self, segments: Segments) -> int:
        """Exact size of an encoded cell."""

    def encode(self, values: FloatArray, segments: Segments) -> bytes:
        """`values` (sum(segments),) as bytes. Raises NonFinite."""

    def decode(self, data: bytes | memoryview, segments: Segments, out: FloatArray) -> None:
        """Fills `out` (sum(segments),), always with finite values.

        Raises BadEncoding on a wrong length, before anything is allocated, and on content that no `encode`
        makes, before `out` is touched.
        """


def codec_for(name: str) -> Codec:
    """Raises ValueError on an unknown name."""
    match name:
        case "fp32":
            return Fp32()
        case "bf16":
            return Bf16()
        case "int8":
            return Int8()
        case _:
            raise ValueError(f"unknown codec {name!r}: fp32, bf16 or int8")
