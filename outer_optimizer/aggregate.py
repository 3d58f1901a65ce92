"""The weighted mean of contributions: fp32, in the order given, multiply and add rounded apart.

The order is part of the promise that all islands hold the same bits, and the caller's duty: sum in sorted
order of island ids. Weights are normalised once, by whoever plans the round, and travel as fp32; nobody
else computes them again.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from outer_optimizer.transform import FloatArray


def add_weighted(
    total: FloatArray, values: FloatArray, weight: np.float32, scratch: FloatArray
) -> None:
    """total += weight * values, as two operations. Shapes: all (values,); `scratch` is overwritten."""
    np.multiply(values, weight, out=scratch)
    np.add(total, scratch, out=total)


def weighted_mean(
    contributions: Iterable[FloatArray], weights: Iterable[np.float32], out: FloatArray
) -> None:
    """out = sum of weight * contribution, first to last. Raises ValueError if one runs out first."""
    out.fill(0.0)
    scratch = np.empty_like(out)
    for values, weight in zip(contributions, weights, strict=True):
        add_weighted(out, values, weight, scratch)
