"""How a cell travels. A codec is pure: values -> bytes -> values, the size known beforehand.

A cell is a run of *segments*, pieces of different tensors; blocks restart at each, so no scale is shared
by two tensors. Both directions of a round use the same codec, and everybody, the owner of a part too,
goes on with the decoded bytes.
"""

from __future__ import annotations

from typing import Protocol

from outer_optimizer.codec_bf16 import Bf16
from outer_optimizer.codec_fp32 import Fp32
from outer_optimizer.codec_int8 import Int8
from outer_optimizer.transform import FloatArray

Segments = tuple[int, ...]


class Codec(Protocol):
    name: str

    def encoded_bytes(self, segments: Segments) -> int:
        """Exact size of an encoded cell."""

    def encode(self, values: FloatArray, segments: Segments) -> bytes:
        """Raises NonFinite."""

    def decode(self, data: bytes | memoryview, segments: Segments, out: FloatArray) -> None:
        """Raises BadEncoding on a wrong length or impossible content, before `out` is touched."""


def codec_for(name: str) -> Codec:
    """Raises ValueError on an unknown name."""
    codecs: tuple[Codec, ...] = (Fp32(), Bf16(), Int8())
    for codec in codecs:
        if codec.name == name:
            return codec
    raise ValueError(f"unknown codec {name!r}: fp32, bf16 or int8")
