"""bf16: the upper half of fp32, rounded to nearest even; 2 bytes each.

Rounding is integer arithmetic on the bits, so it is the same on every CPU. What would round up to infinity
becomes the largest finite bf16. Error <= 2^-8 |value|, or 2^-134 where the value is denormal.
"""

from __future__ import annotations

import numpy as np

from outer_optimizer.encoding import BadEncoding, Segments, require_length
from outer_optimizer.finite import require_finite
from outer_optimizer.rounding import round_to_bf16
from outer_optimizer.transform import FloatArray

_WIRE = np.dtype("<u2")
_SIGN = np.uint16(0x8000)
_MAGNITUDE = np.uint16(0x7FFF)
_LARGEST = np.uint16(0x7F7F)  # the largest finite magnitude; what lies above is infinity or NaN
_DROPPED_BITS = np.uint32(16)


class Bf16:
    name = "bf16"

    def encoded_bytes(self, segments: Segments) -> int:
        return _WIRE.itemsize * sum(segments)

    def encode(self, values: FloatArray, segments: Segments) -> bytes:
        require_finite(values, "a cell")
        rounded = values.copy()
        round_to_bf16(rounded)
        upper = (rounded.view(np.uint32) >> _DROPPED_BITS).astype(_WIRE)
        sign = upper & _SIGN
        np.minimum(upper & _MAGNITUDE, _LARGEST, out=upper)
        np.bitwise_or(upper, sign, out=upper)
        return upper.tobytes()

    def decode(self, data: bytes | memoryview, segments: Segments, out: FloatArray) -> None:
        require_length(data, self.encoded_bytes(segments))
        upper = np.frombuffer(data, _WIRE)
        if ((upper & _MAGNITUDE) > _LARGEST).any():
            raise BadEncoding("an encoded cell with a value that is not finite")
        np.left_shift(upper.astype(np.uint32), _DROPPED_BITS, out=out.view(np.uint32))
