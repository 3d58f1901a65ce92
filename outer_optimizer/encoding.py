"""What all codecs check."""

from __future__ import annotations


class BadEncoding(ValueError):
    """Bytes that are not an encoded cell of this codec and shape."""


def require_length(data: bytes | memoryview, expected_bytes: int) -> None:
    if len(data) != expected_bytes:
        raise BadEncoding(f"an encoded cell of {len(data)} bytes, {expected_bytes} are right")
