"""An outer optimizer is a pair of pure functions, (init, update), over flat fp32 arrays.

`update` reads the old anchor and state and writes the new ones into buffers of the caller's, so a round
that fails leaves nothing half-applied. It is elementwise: called cell by cell it gives the same bits, and
its temporaries are never larger than the cell it is given.

Invariant: every operation is rounded by itself. No fused multiply-add and nothing whose bits depend on the
CPU (exp, log, dot products, sums): only + - * / sqrt sign and comparisons of IEEE fp32, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
State = tuple[FloatArray, ...]


class Hyper(NamedTuple):
    """Settings of one round. Each transform uses those it needs, rounded to fp32 once."""

    lr: float
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3


Update = Callable[[FloatArray, FloatArray, State, Hyper, FloatArray, State], None]
"""update(anchor, gradient, state, hyper, new_anchor, new_state).

Shapes: all arrays (values,). The new ones are overwritten and overlap none of the old, which stay as they
are. Nothing is checked: whoever keeps the result asks `require_finite`.
"""


class OuterTransform(NamedTuple):
    """`state_names`: the fp32 arrays of the anchor's size that are kept from round to round.

    `init` fills them for round 0; `update` is one round.
    """

    name: str
    state_names: tuple[str, ...]
    init: Callable[[State], None]
    update: Update


def zeros(state: State) -> None:
    """The start of every state here."""
    for array in state:
        array.fill(0.0)
