"""int8: blocks of 512 values share one fp32 scale; 1 + 4/512 bytes each.

Wire: all scales of the cell (fp32, little-endian), then all codes (int8). Blocks restart at each segment.
    scale = absmax / 127,   code = rint(value / scale),   value' = code scale

Error <= scale / 2 (1 + 2^-15): the half step of rint, and the rounding of quotient and product in fp32. A
block whose absmax is below 2^-100 becomes zeros: a denormal scale has too few bits for that bound, and for
codes that fit.

Invariant: -127 <= code <= 127 without clipping, as a normal scale puts absmax / scale within 2 ulp of 127.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outer_optimizer.encoding import BadEncoding, Segments, require_length
from outer_optimizer.finite import require_finite
from outer_optimizer.transform import FloatArray

BLOCK_VALUES = 512
_SCALE = np.dtype("<f4")
_CODES = np.float32(127.0)
_NEGLIGIBLE = np.float32(2.0**-100)
# One ulp below max / 127: the largest scale whose product with 127 is finite.
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / _CODES, np.float32(0.0))


class Int8:
    name = "int8"

    def encoded_bytes(self, segments: Segments) -> int:
        blocks = sum(-(-length // BLOCK_VALUES) for length in segments)
        return _SCALE.itemsize * blocks + sum(segments)

    def encode(self, values: FloatArray, segments: Segments) -> bytes:
        require_finite(values, "a cell")
        starts = _block_starts(segments)
        scales = _scales(values, starts)
        divisors = np.where(scales > 0, scales, np.float32(np.inf))
        codes = values / _per_value(divisors, starts, values.size)
        np.rint(codes, out=codes)
        return scales.astype(_SCALE, copy=False).tobytes() + codes.astype(np.int8).tobytes()

    def decode(self, data: bytes | memoryview, segments: Segments, out: FloatArray) -> None:
        require_length(data, self.encoded_bytes(segments))
        starts = _block_starts(segments)
        scales = np.frombuffer(data, _SCALE, starts.size)
        codes = np.frombuffer(data, np.int8, offset=scales.nbytes)
        if not ((scales >= 0) & (scales <= _LARGEST_SCALE)).all():
            raise BadEncoding("an int8 cell with an impossible scale")
        if (codes == -128).any():
            raise BadEncoding("an int8 cell with the code -128")
        np.multiply(codes, _per_value(scales, starts, codes.size), out=out, dtype=np.float32)


def _block_starts(segments: Segments) -> NDArray[np.intp]:
    """Where blocks begin within the cell; none is empty."""
    starts: list[int] = []
    begin = 0
    for length in segments:
        starts.extend(range(begin, begin + length, BLOCK_VALUES))
        begin += length
    return np.array(starts, np.intp)


def _scales(values: FloatArray, starts: NDArray[np.intp]) -> FloatArray:
    """One for each block; 0 where nothing of it travels."""
    if not starts.size:
        return np.zeros(0, np.float32)
    absmax = np.maximum.reduceat(np.abs(values), starts)
    absmax[absmax < _NEGLIGIBLE] = 0.0
    return np.minimum(absmax / _CODES, _LARGEST_SCALE)


def _per_value(of_block: FloatArray, starts: NDArray[np.intp], values: int) -> FloatArray:
    return np.repeat(of_block, np.diff(starts, append=values))
