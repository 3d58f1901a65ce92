"""Weighted means, pseudo-gradients, norms, phases and digests."""

import math
from fractions import Fraction

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from outer_optimizer.aggregate import add_weighted, weighted_mean
from outer_optimizer.digest import state_digest
from outer_optimizer.finite import NonFinite, require_finite
from outer_optimizer.pseudo_gradient import pseudo_gradient, squared_norm
from outer_optimizer.schedule import Phase, phase_at
from outer_optimizer.transform import FloatArray

f32 = np.float32
LARGEST = float(np.finfo(f32).max)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[FloatArray], list[np.float32]]:
    """Contributions of one length and weights that sum to about 1."""
    islands, size = draw(st.integers(1, 6)), draw(st.integers(0, 40))
    one = hnp.arrays(f32, size, elements=st.floats(-1e4, 1e4, width=32))
    tokens = draw(st.lists(st.integers(1, 10**6), min_size=islands, max_size=islands))
    return [draw(one) for _ in tokens], [f32(t / sum(tokens)) for t in tokens]


def mean_of(contributions: list[FloatArray], weights: list[np.float32]) -> FloatArray:
    out = np.full_like(contributions[0], np.nan)
    weighted_mean(contributions, weights, out)
    return out


def near(contributions: list[FloatArray], weights: list[np.float32]) -> FloatArray:
    """How far fp32 may be off: one rounding for each product and one for each sum."""
    size = sum(
        np.abs(c.astype(np.float64)) * w for c, w in zip(contributions, weights, strict=True)
    )
    return (len(weights) + 1) * 2.0**-24 * size * 1.001 + 1e-44


@given(rounds())
def test_the_weighted_mean_is_near_a_float64_oracle(
    drawn: tuple[list[FloatArray], list[np.float32]],
) -> None:
    contributions, weights = drawn
    oracle = sum(
        c.astype(np.float64) * float(w) for c, w in zip(contributions, weights, strict=True)
    )
    error = np.abs(mean_of(contributions, weights) - oracle)
    assert np.all(error <= near(contributions, weights))


@given(rounds())
def test_the_same_order_gives_the_same_bits_and_another_nearly_the_same(
    drawn: tuple[list[FloatArray], list[np.float32]],
) -> None:
    contributions, weights = drawn
    mean = mean_of(contributions, weights)
    assert mean_of([c.copy() for c in contributions], weights).tobytes() == mean.tobytes()
    reverse = mean_of(contributions[::-1], weights[::-1]).astype(np.float64)
    assert np.all(np.abs(reverse - mean) <= 2 * near(contributions, weights))


def test_the_order_of_contributions_decides_the_last_bits() -> None:
    contributions = [np.array([v], f32) for v in (1.0, 2.0**-24, 2.0**-24)]
    weights = [f32(1)] * 3
    assert mean_of(contributions, weights)[0] == 1
    assert mean_of(contributions[::-1], weights)[0] == 1 + 2.0**-23


def test_more_contributions_than_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        mean_of([np.ones(2, f32), np.ones(2, f32)], [f32(1)])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_add_weighted_rounds_the_product_before_it_adds(size: int) -> None:
    weight, value, start = 1 + Fraction(1, 2**12), 1 + Fraction(1, 2**12), -1 - Fraction(1, 2**11)
    fused = start + weight * value  # exact, and an fp32 number: what one rounding would give
    assert fused == Fraction(float(f32(float(fused)))) == Fraction(1, 2**24)
    total, values = np.full(size, float(start), f32), np.full(size, float(value), f32)
    assert Fraction(float(total[0])) == start
    assert Fraction(float(values[0])) == value
    add_weighted(total, values, f32(float(weight)), np.full(size, np.nan, f32))
    assert total.tolist() == [0.0] * size


def test_add_weighted_keeps_the_values() -> None:
    values = np.array([1, 2, 3], f32)
    values.flags.writeable = False
    total = np.ones(3, f32)
    add_weighted(total, values, f32(0.5), np.empty(3, f32))
    assert total.tolist() == [1.5, 2, 2.5]


def test_the_pseudo_gradient_is_anchor_minus_local() -> None:
    out = np.empty(2, f32)
    pseudo_gradient(np.array([3, 1], f32), np.array([1, 4], f32), out)
    assert out.tolist() == [2, -3]


@pytest.mark.parametrize(
    ("anchor", "local"),
    [(1.0, np.nan), (np.nan, 1.0), (1.0, np.inf), (np.inf, np.inf), (LARGEST, -LARGEST)],
)
def test_a_pseudo_gradient_that_is_not_finite_is_refused(anchor: float, local: float) -> None:
    with pytest.raises(NonFinite, match="pseudo-gradient: value 1 "):
        pseudo_gradient(np.array([0, anchor], f32), np.array([0, local], f32), np.empty(2, f32))


def test_require_finite_names_the_first_bad_place() -> None:
    require_finite(np.array([], f32), "nothing")
    with pytest.raises(NonFinite, match="a buffer: value 2 is not finite"):
        require_finite(np.array([0, 1, np.inf, np.nan], f32), "a buffer")


@given(hnp.arrays(f32, st.integers(0, 300), elements=st.floats(-LARGEST, LARGEST, width=32)))
def test_the_squared_norm_is_a_float64_sum(values: FloatArray) -> None:
    exact = math.fsum(float(v) ** 2 for v in values)  # squares of fp32 are exact in fp64
    assert squared_norm(values) == pytest.approx(exact, rel=1e-12, abs=0)


PHASES = (Phase(0, 5, 1.0, 0.0), Phase(3, 20, 0.7, 0.5), Phase(10, 50, 0.7, 0.9))


@pytest.mark.parametrize(
    ("round_", "index"), [(0, 0), (2, 0), (3, 1), (9, 1), (10, 2), (11, 2), (10**9, 2)]
)
def test_a_phase_holds_from_its_round_until_the_next(round_: int, index: int) -> None:
    assert phase_at(PHASES, round_) == PHASES[index]


@given(st.sets(st.integers(1, 50), max_size=5), st.integers(0, 60))
def test_the_phase_of_a_round_is_the_last_that_has_begun(later: set[int], round_: int) -> None:
    starts = [0, *sorted(later)]
    phases = [Phase(start, 1, 1.0, 0.0) for start in starts]
    assert phase_at(phases, round_).from_round == max(s for s in starts if s <= round_)


@pytest.mark.parametrize("starts", [[], [1], [1, 5], [0, 5, 5], [0, 5, 3], [0, 0], [5, 0]])
def test_phases_must_start_at_round_0_and_rise(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="start at round 0 and rise"):
        phase_at([Phase(start, 1, 1.0, 0.0) for start in starts], 7)


any_bits = hnp.arrays(np.uint32, st.integers(0, 50)).map(lambda bits: bits.view(f32))


@given(any_bits, st.lists(any_bits, max_size=3))
def test_the_state_digest_is_blake3_of_all_bytes_in_order(
    anchor: FloatArray, state: list[FloatArray]
) -> None:
    content = b"".join(array.astype("<f4").tobytes() for array in (anchor, *state))
    assert state_digest(anchor, state) == blake3(content).digest()


def test_the_state_digest_reads_cells_of_larger_arrays() -> None:
    whole = np.arange(10, dtype=f32)
    assert state_digest(whole[2:5], (whole[::3],)) == state_digest(
        np.array([2, 3, 4], f32), (np.array([0, 3, 6, 9], f32),)
    )


def test_one_flipped_bit_changes_the_state_digest() -> None:
    anchor, momentum = np.zeros(100, f32), np.zeros(100, f32)
    before = state_digest(anchor, (momentum,))
    momentum[99] = -0.0
    assert state_digest(anchor, (momentum,)) != before
