"""BLAKE3 digests, 32 bytes: equal exactly when what they digest is, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from outer_optimizer.transform import FloatArray

_WIRE = np.dtype("<f4")


def state_digest(anchor_cell: FloatArray, state_cells: Sequence[FloatArray]) -> bytes:
    """BLAKE3(anchor cell ‖ outer-state cells), little-endian fp32, states in the order of their names."""
    hasher = blake3()
    for cell in (anchor_cell, *state_cells):
        hasher.update(np.ascontiguousarray(cell, _WIRE).view(np.uint8).data)
    return hasher.digest()
