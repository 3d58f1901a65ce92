from __future__ import annotations

import numpy as np
import torch

from outer_optimizer.rounding import round_to_bf16


def test_rounding_is_that_of_a_bf16_parameter() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3e38)]
    expected = torch.from_numpy(values.copy()).bfloat16().float().numpy()
    round_to_bf16(values)
    assert np.array_equal(values, expected)
