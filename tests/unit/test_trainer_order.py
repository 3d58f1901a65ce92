from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from node.order import sample_at


@given(
    samples=st.integers(1, 3_000),
    epoch=st.integers(0, 1 << 20),
    seed=st.integers(0, (1 << 63) - 1),
)
def test_each_epoch_is_a_bijection(samples: int, epoch: int, seed: int) -> None:
    positions = np.arange(epoch * samples, (epoch + 1) * samples)
    assert sorted(sample_at(positions, samples, seed).tolist()) == list(range(samples))


def test_epochs_and_seeds_differ() -> None:
    first = sample_at(np.arange(1_000), 1_000, 0)
    assert (first != sample_at(np.arange(1_000, 2_000), 1_000, 0)).mean() > 0.9
    assert (first != sample_at(np.arange(1_000), 1_000, 1)).mean() > 0.9
    assert (first != np.arange(1_000)).mean() > 0.9


def test_one_position_or_any_shape() -> None:
    many = sample_at(np.arange(12).reshape(3, 4), 10, 5)
    assert many.shape == (3, 4)
    assert int(sample_at(6, 10, 5)) == many[1, 2]


def test_the_order_is_the_same_on_every_machine() -> None:
    recorded = [846177, 768649, 557324, 945125, 301328, 99418, 712253, 996618]
    assert sample_at(np.arange(8), 1_000_003, 7).tolist() == recorded
