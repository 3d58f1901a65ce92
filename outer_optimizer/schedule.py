"""How often islands meet and how far the outer step goes, as a pure function of the round number.

Momentum 0.9 from the first round is worse on toy runs than one island alone: early pseudo-gradients point
anywhere and the buffer keeps them for about ten rounds. A short start-up of frequent plain averages (small
H, no momentum) brings all islands into one basin first; from there large H with momentum pays.

The round number, and never a count kept by a process, decides: an island that joins late is at the right
point at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Phase(NamedTuple):
    """Holds from round `from_round` on; `inner_steps` = H, inner steps between two rounds of a fragment."""

    from_round: int
    inner_steps: int
    lr: float
    momentum: float


def phase_at(phases: Sequence[Phase], round_: int) -> Phase:
    """The phase of a round >= 0. Raises ValueError unless phases start at round 0 and rise strictly."""
    starts = [phase.from_round for phase in phases]
    if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
        raise ValueError("phases must start at round 0 and rise strictly")
    return next(phase for phase in reversed(phases) if phase.from_round <= round_)
