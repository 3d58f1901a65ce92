"""The weighted mean is a mean, in the order given, and its weights are shares of the tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outer_optimizer.aggregate import add_weighted, weighted_mean
from protocol.weights import normalised_weights

token_lists = st.lists(st.integers(0, 10**15), min_size=1, max_size=50)


@settings(max_examples=50, deadline=None)
@given(token_lists, st.integers(0, 2**32))
def test_the_mean_is_that_of_an_fp64_oracle(tokens: list[int], seed: int) -> None:
    weights = [np.float32(w) for w in normalised_weights(tokens)]
    values = np.random.default_rng(seed).standard_normal((len(tokens), 64)).astype(np.float32)
    out = np.full(64, np.nan, np.float32)
    weighted_mean(iter(values), iter(weights), out)
    wide = [float(w) * v.astype(np.float64) for w, v in zip(weights, values, strict=True)]
    # Each term is rounded once, and each partial sum once.
    slack = (len(tokens) + 1) * 2.0**-24 * np.abs(wide).sum(axis=0)
    assert (np.abs(out - np.sum(wide, axis=0)) <= slack).all()


def test_the_sum_runs_in_the_order_given() -> None:
    one, tiny = np.ones(1, np.float32), np.full(1, 2.0**-24, np.float32)
    weights = [np.float32(1)] * 3
    first, last = np.empty_like(one), np.empty_like(one)
    weighted_mean([one, tiny, tiny], weights, first)  # each tiny one is rounded away
    weighted_mean([tiny, tiny, one], weights, last)
    assert (first[0], last[0]) == (1.0, 1.0 + 2.0**-23)


def test_multiply_and_add_are_rounded_apart() -> None:
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24. Rounded before the add the last term is lost; fused it would stay.
    factor = np.float32(1 + 2.0**-12)
    total = np.full(1, -1 - 2.0**-11, np.float32)
    values = np.full(1, factor)
    add_weighted(total, values, factor, np.empty(1, np.float32))
    assert total[0] == 0.0
    assert values[0] == factor


def test_a_contribution_without_a_weight_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        weighted_mean([np.ones(2, np.float32)] * 2, [np.float32(1)], np.empty(2, np.float32))
