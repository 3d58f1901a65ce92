"""int8: blocks of 512 values share one fp32 scale; 1 + 4/512 bytes each.

Wire: all scales of the cell (fp32, little-endian), then all codes (int8). Blocks restart at each segment.
    scale = absmax / 127,   code = rint(value / scale) in [-127, 127],   value' = code * scale
Error <= scale / 2 (1 + 2^-20), for values below 2^127. A block whose absmax is below 2^-100 becomes zeros: its scale would be
denormal, and what it holds is far below anything a parameter can show.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outer_optimizer.encoding import BadEncoding, require_length
from outer_optimizer.finite import require_finite
from outer_optimizer.transform import FloatArray

BLOCK_VALUES = 512
_SCALE = np.dtype("<f4")
_CODES = np.float32(127.0)
_NEGLIGIBLE = np.float32(2.0**-100)
_LARGEST_SCALE = np.float32(2.0**121)  # times 127 it is still finite


class Int8:
    name = "int8"

    def encoded_bytes(self, segments: tuple[int, ...]) -> int:
        return _SCALE.itemsize * _block_count(segments) + sum(segments)

    def encode(self, values: FloatArray, segments: tuple[int, ...]) -> bytes:
        require_finite(values, "a cell")
        starts = _block_starts(segments)
        sizes = np.diff(starts, append=values.size)
        scales = np.zeros(starts.size, np.float32)
        if starts.size:
            np.maximum.reduceat(np.abs(values), starts, out=scales)
        scales[scales < _NEGLIGIBLE] = 0.0
        np.divide(scales, _CODES, out=scales)
        np.minimum(scales, _LARGEST_SCALE, out=scales)
        divisors = np.where(scales > 0, scales, np.float32(np.inf))
        codes = np.rint(values / np.repeat(divisors, sizes))
        np.clip(codes, -_CODES, _CODES, out=codes)
        return b"".join((scales.astype(_SCALE, copy=False).data, codes.astype(np.int8).data))

    def decode(self, data: bytes | memoryview, segments: tuple[int, ...], out: FloatArray) -> None:
        require_length(data, self.encoded_bytes(segments))
        starts = _block_starts(segments)
        scales = np.frombuffer(data, _SCALE, starts.size)
        codes = np.frombuffer(data, np.int8, offset=starts.size * _SCALE.itemsize)
        if not ((scales >= 0) & (scales <= _LARGEST_SCALE)).all():
            raise BadEncoding("an int8 cell with an impossible scale")
        sizes = np.diff(starts, append=codes.size)
        np.multiply(codes, np.repeat(scales, sizes), out=out, dtype=np.float32)


def _block_count(segments: tuple[int, ...]) -> int:
    return sum(-(-length // BLOCK_VALUES) for length in segments)


def _block_starts(segments: tuple[int, ...]) -> NDArray[np.intp]:
    """Where blocks begin within the cell."""
    starts: list[int] = []
    begin = 0
    for length in segments:
        starts.extend(range(begin, begin + length, BLOCK_VALUES))
        begin += length
    return np.array(starts, np.intp)
