"""One all-to-all along a mesh axis, with a gradient: the way back is the same exchange turned round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_to_all_single_autograd,
)


def exchange(x: Tensor, incoming: Sequence[int], outgoing: Sequence[int], group: Any) -> Tensor:
    """The first outgoing[0] rows of `x` go to rank 0 of `group`, and so on; incoming[r] come from rank r."""
    out = all_to_all_single_autograd(x.contiguous(), list(incoming), list(outgoing), group)
    return out.wait() if isinstance(out, AsyncCollectiveTensor) else out
