"""The pseudo-gradient: anchor minus local parameters, a descent direction that goes straight into SGD.

Sign: subtracting it from the anchor, lr 1 and no momentum, gives the local parameters back.
"""

from __future__ import annotations

import numpy as np

from outer_optimizer.finite import require_finite
from outer_optimizer.transform import FloatArray


def pseudo_gradient(anchor: FloatArray, local: FloatArray, out: FloatArray) -> None:
    """out = anchor - local, in fp32: the difference of near-equal numbers.

    Shapes: all (values,). Raises NonFinite if any difference is not finite; `out` then holds it.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        np.subtract(anchor, local, out=out)
    require_finite(out, "the pseudo-gradient")


def squared_norm(values: FloatArray) -> float:
    """Sum of squares in fp64.

    The order of a sum depends on the machine, so this number is computed once, by its owner, and travels;
    others may check it within a tolerance and never for equality.
    """
    wide = values.astype(np.float64)
    return float(np.add.reduce(wide * wide))
