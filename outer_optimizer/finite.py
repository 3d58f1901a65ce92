"""Nothing that is not finite may enter the agreed state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class NonFinite(ValueError):
    """A value is NaN or infinite."""


def require_finite(values: NDArray[np.float32], what: str) -> None:
    """Raises NonFinite naming `what` and the first bad place."""
    finite = np.isfinite(values)
    if not finite.all():
        raise NonFinite(f"{what}: value {int(np.argmin(finite))} is not finite")
