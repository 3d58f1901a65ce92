"""Weights of a round: by tokens, normalised once by whoever plans, then travelling as fp32.

Pure. Nobody recomputes them: a sum of fp64 divisions rounded to fp32 in two places may differ.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence


def normalised_weights(tokens: Sequence[int]) -> list[float]:
    """One weight per contribution, each exactly representable in fp32; they sum to 1 within rounding.

    Contributions without a single token (a run that counts none) weigh the same.
    """
    total = sum(tokens)
    exact = [t / total if total else 1 / len(tokens) for t in tokens]
    return [struct.unpack("<f", struct.pack("<f", w))[0] for w in exact]
