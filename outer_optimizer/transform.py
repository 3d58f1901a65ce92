"""An outer optimizer is a pair of pure functions, (init, update), over flat fp32 arrays.

`update` reads the old anchor and state and writes the new ones into buffers of the caller's; it never
modifies its inputs. It is elementwise, so it may be called cell by cell and gives the same bits.

Invariant: every operation is separately rounded. No fused multiply-add, no function whose bits depend on
the CPU (exp, log, dot products, sums): only +, -, *, /, sqrt, abs and comparisons of IEEE fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
State = tuple[FloatArray, ...]


class Hyper(NamedTuple):
    """Settings of one round; each is rounded to fp32 once, where it is used."""

    lr: float
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3


Update = Callable[[FloatArray, FloatArray, State, Hyper, FloatArray, State], None]
"""update(anchor, gradient, state, hyper, new_anchor, new_state); all arrays of one length."""


class OuterTransform(NamedTuple):
    """`state_names`: fp32 arrays of the anchor's size that are kept from round to round."""

    name: str
    state_names: tuple[str, ...]
    init: Callable[[State], None]
    update: Update
