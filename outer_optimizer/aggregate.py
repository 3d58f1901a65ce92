"""The weighted mean of contributions: fp32, in the order given, multiply and add rounded apart.

The order is part of the promise that all islands hold the same bits, and the caller's duty: sum in sorted
order of island ids. Weights are normalised once, by whoever plans the round, and travel as fp32; nobody
else computes them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from outer_optimizer.transform import FloatArray


def normalised_weights(tokens: Sequence[int]) -> list[np.float32]:
    """tokens / their sum, divided in fp64 and rounded to fp32; the weights sum to 1 within rounding.

    Contributions of which none has a token (a run that counts none) weigh the same.
    """
    total = sum(tokens)
    return [np.float32(t / total if total else 1 / len(tokens)) for t in tokens]


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
