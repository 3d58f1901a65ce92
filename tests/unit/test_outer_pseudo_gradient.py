"""The pseudo-gradient points from local parameters to the anchor, and is finite."""

import numpy as np
import pytest

from outer_optimizer.finite import NonFinite, require_finite
from outer_optimizer.pseudo_gradient import pseudo_gradient, squared_norm


def test_it_is_anchor_minus_local() -> None:
    out = np.empty(2, np.float32)
    pseudo_gradient(np.array([1, 5], np.float32), np.array([0.25, 7], np.float32), out)
    assert out.tolist() == [0.75, -2.0]


@pytest.mark.parametrize("local", [np.nan, np.inf, np.finfo(np.float32).min])
def test_a_difference_that_is_not_finite_is_refused(local: float) -> None:
    anchor = np.full(3, np.finfo(np.float32).max)
    parameters = np.array([1, local, 1], np.float32)
    with pytest.raises(NonFinite, match="pseudo-gradient: value 1 "):
        pseudo_gradient(anchor, parameters, np.empty(3, np.float32))


def test_finite_values_pass() -> None:
    require_finite(np.array([0, -1e-45, 3e38], np.float32), "a cell")


def test_the_squared_norm_is_summed_in_fp64() -> None:
    assert squared_norm(np.array([3, 4], np.float32)) == 25.0
    assert squared_norm(np.full(2, 1e30, np.float32)) == pytest.approx(2e60)  # beyond fp32
    assert squared_norm(np.zeros(0, np.float32)) == 0.0
