"""fp32 values rounded to bf16, to nearest even: what a bf16 parameter holds of an fp32 anchor.

Integer arithmetic on the bits, so the result is the same on every CPU.
"""

from __future__ import annotations

import numpy as np

from outer_optimizer.transform import FloatArray

_BELOW_HALF = np.uint32(0x7FFF)
_UPPER = np.uint32(0xFFFF0000)


def round_to_bf16(values: FloatArray) -> None:
    """In place; `values` are finite."""
    bits = values.view(np.uint32)
    bits += _BELOW_HALF + ((bits >> np.uint32(16)) & np.uint32(1))
    bits &= _UPPER
