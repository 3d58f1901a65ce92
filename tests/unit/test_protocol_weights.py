"""Weights are shares of the tokens, exactly representable in fp32."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.weights import normalised_weights

token_lists = st.lists(st.integers(0, 10**15), min_size=1, max_size=50)


@settings(max_examples=100, deadline=None)
@given(token_lists)
def test_weights_are_fp32_shares_that_sum_to_1(tokens: list[int]) -> None:
    weights = normalised_weights(tokens)
    assert all(weight == np.float32(weight) for weight in weights)
    assert sum(map(float, weights)) == pytest.approx(1, abs=1e-6)
    if sum(tokens):
        shares = [t / sum(tokens) for t in tokens]
        np.testing.assert_allclose(weights, shares, rtol=2.0**-24, atol=2.0**-149)


def test_contributions_without_any_token_weigh_the_same() -> None:
    assert normalised_weights([0, 0, 0, 0]) == [0.25, 0.25, 0.25, 0.25]
