"""bf16: the upper half of fp32, rounded to nearest even; 2 bytes each.

Rounding is integer arithmetic on the bits, so it is the same on every CPU. What would round up to
infinity becomes the largest finite bf16. Error <= 2^-8 of the value's magnitude.
"""

from __future__ import annotations

import numpy as np

from outer_optimizer.encoding import BadEncoding, require_length
from outer_optimizer.finite import require_finite
from outer_optimizer.transform import FloatArray

_WIRE = np.dtype("<u2")
_EXPONENT = np.uint16(0x7F80)
_SIGN = np.uint16(0x8000)
_LARGEST = np.uint16(0x7F7F)


class Bf16:
    name = "bf16"

    def encoded_bytes(self, segments: tuple[int, ...]) -> int:
        return _WIRE.itemsize * sum(segments)

    def encode(self, values: FloatArray, segments: tuple[int, ...]) -> bytes:
        require_finite(values, "a cell")
        bits = values.view(np.uint32)
        half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        upper = ((bits + half) >> np.uint32(16)).astype(np.uint16)
        overflowed = (upper & _EXPONENT) == _EXPONENT
        upper[overflowed] = (upper[overflowed] & _SIGN) | _LARGEST
        return upper.astype(_WIRE, copy=False).tobytes()

    def decode(self, data: bytes | memoryview, segments: tuple[int, ...], out: FloatArray) -> None:
        require_length(data, self.encoded_bytes(segments))
        upper = np.frombuffer(data, _WIRE)
        if ((upper & _EXPONENT) == _EXPONENT).any():
            raise BadEncoding("an encoded cell with a value that is not finite")
        np.left_shift(upper.astype(np.uint32), np.uint32(16), out=out.view(np.uint32))
