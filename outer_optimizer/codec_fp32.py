"""fp32: the values themselves, little-endian; 4 bytes each, exact."""

from __future__ import annotations

import numpy as np

from outer_optimizer.encoding import BadEncoding, Segments, require_length
from outer_optimizer.finite import require_finite
from outer_optimizer.transform import FloatArray

_WIRE = np.dtype("<f4")


class Fp32:
    name = "fp32"

    def encoded_bytes(self, segments: Segments) -> int:
        return _WIRE.itemsize * sum(segments)

    def encode(self, values: FloatArray, segments: Segments) -> bytes:
        require_finite(values, "a cell")
        return values.astype(_WIRE, copy=False).tobytes()

    def decode(self, data: bytes | memoryview, segments: Segments, out: FloatArray) -> None:
        require_length(data, self.encoded_bytes(segments))
        values = np.frombuffer(data, _WIRE)
        if not np.isfinite(values).all():
            raise BadEncoding("an encoded cell with a value that is not finite")
        np.copyto(out, values)
