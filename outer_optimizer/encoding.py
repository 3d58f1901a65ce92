"""What all codecs share: the shape of a cell, and the refusal of bytes that are none."""

from __future__ import annotations

Segments = tuple[int, ...]
"""Lengths, in values, of the pieces of tensors that make up a cell; they sum to the cell."""


class BadEncoding(ValueError):
    """Bytes that are not an encoded cell of this codec and these segments."""


def require_length(data: bytes | memoryview, expected_bytes: int) -> None:
    """Raises BadEncoding."""
    if len(data) != expected_bytes:
        raise BadEncoding(f"an encoded cell of {len(data)} bytes, {expected_bytes} are right")
