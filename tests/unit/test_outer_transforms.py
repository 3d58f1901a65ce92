"""Outer optimizers: hand-computed steps, the usual sign and momentum mistakes, cells equal the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from outer_optimizer.optimizer import transform_for
from outer_optimizer.transform import FloatArray, Hyper, State

NAMES = ("nesterov", "sgd", "average", "adam", "yogi")
f32 = np.float32


def array(*values: float) -> FloatArray:
    return np.array(values, f32)


def run(
    name: str, hyper: Hyper, anchor: FloatArray, gradients: list[FloatArray]
) -> tuple[list[FloatArray], State]:
    """The anchors after each step and the last state."""
    transform = transform_for(name)
    state: State = tuple(np.full_like(anchor, np.nan) for _ in transform.state_names)
    transform.init(state)
    anchors = []
    for gradient in gradients:
        new_anchor = np.full_like(anchor, np.nan)
        new_state: State = tuple(np.full_like(anchor, np.nan) for _ in state)
        transform.update(anchor, gradient, state, hyper, new_anchor, new_state)
        anchor, state = new_anchor, new_state
        anchors.append(anchor)
    return anchors, state


def equal_bits(a: FloatArray, b: FloatArray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_average_subtracts_the_gradient() -> None:
    anchors, state = run("average", Hyper(lr=0.5), array(10, -1), [array(4, 0.5), array(2, -2)])
    assert equal_bits(anchors[0], array(6, -1.5))
    assert equal_bits(anchors[1], array(4, 0.5))
    assert state == ()


def test_sgd_subtracts_lr_times_the_gradient() -> None:
    anchors, state = run("sgd", Hyper(lr=0.25), array(10, -1), [array(4, 1), array(2, -2)])
    assert equal_bits(anchors[0], array(9, -1.25))
    assert equal_bits(anchors[1], array(8.5, -0.75))
    assert state == ()


def test_nesterov_looks_ahead_with_the_new_buffer() -> None:
    hyper = Hyper(lr=0.25, momentum=0.5)
    anchors, (buffer,) = run("nesterov", hyper, array(10, 0), [array(4, -8), array(2, 4)])
    # b = 4, -8; the step is lr (g + mu b) = 0.25 (4 + 2), 0.25 (-8 - 4)
    assert equal_bits(anchors[0], array(8.5, 3))
    # b = 0.5 * 4 + 2, 0.5 * -8 + 4; the step is 0.25 (2 + 2), 0.25 (4 + 0)
    assert equal_bits(anchors[1], array(7.5, 2))
    assert equal_bits(buffer, array(4, 0))


def test_nesterov_rounds_its_settings_and_every_operation_to_fp32() -> None:
    anchors, (buffer,) = run(
        "nesterov", Hyper(lr=0.7, momentum=0.9), array(0.1), [array(0.3), array(-0.2)]
    )
    lr, mu, a, g, h = f32(0.7), f32(0.9), f32(0.1), f32(0.3), f32(-0.2)
    first = a - (g * mu + g) * lr
    b = g * mu + h
    assert equal_bits(anchors[0], array(first))
    assert equal_bits(anchors[1], array(first - (b * mu + h) * lr))
    assert equal_bits(buffer, array(b))


def test_adam_is_algorithm_2_without_bias_correction() -> None:
    hyper = Hyper(lr=2.0, beta1=0.5, beta2=0.75, epsilon=4.0)
    anchors, (m, v) = run("adam", hyper, array(10, 1), [array(8, 0), array(1, 0)])
    # m = 4, v = 16: 10 - 2 * 4 / (4 + 4)
    assert equal_bits(anchors[0], array(9, 1))
    # m = 2 + 0.5, v = 12 + 0.25: 9 - 2 * 2.5 / (3.5 + 4)
    assert equal_bits(anchors[1], array(f32(9) - f32(2) * (f32(2.5) / f32(7.5)), 1))
    assert equal_bits(m, array(2.5, 0))
    assert equal_bits(v, array(12.25, 0))


def test_yogi_moves_the_second_moment_by_the_sign_of_its_difference() -> None:
    hyper = Hyper(lr=2.0, beta1=0.5, beta2=0.75, epsilon=4.0)
    gradients = [array(8), array(6), array(4)]
    anchors, (m, v) = run("yogi", hyper, array(10), gradients)
    # m = 4, v = 0 + 0.25 * 64: 10 - 2 * 4 / (4 + 4)
    assert equal_bits(anchors[0], array(9))
    # m = 2 + 3, v = 16 + 0.25 * 36, upwards as 16 < 36: 9 - 2 * 5 / (5 + 4)
    second = f32(9) - f32(2) * (f32(5) / f32(9))
    assert equal_bits(anchors[1], array(second))
    # m = 2.5 + 2, v = 25 - 0.25 * 16, downwards as 25 > 16
    third = second - f32(2) * (f32(4.5) / (np.sqrt(f32(21)) + f32(4)))
    assert equal_bits(anchors[2], array(third))
    assert equal_bits(m, array(4.5))
    assert equal_bits(v, array(21))


@pytest.mark.parametrize("name", ["adam", "yogi"])
def test_the_first_adaptive_step_is_about_lr_at_most(name: str) -> None:
    gradient = array(1e-3, 1.0, 1e4, -1e4)
    (anchor,), _ = run(name, Hyper(lr=0.5), array(0, 0, 0, 0), [gradient])
    assert np.all(np.abs(anchor) <= 0.5 * (1 + 1e-5))
    assert np.all(np.sign(anchor) == -np.sign(gradient))


@pytest.mark.parametrize("name", ["average", "sgd", "nesterov"])
def test_one_island_without_momentum_continues_from_its_local_parameters(name: str) -> None:
    anchor, local = array(1, -2, 0.5), array(1.25, -2.5, 0.5)
    (new,), _ = run(name, Hyper(lr=1.0, momentum=0.0), anchor, [anchor - local])
    assert equal_bits(new, local)


def test_nesterov_is_not_heavy_ball() -> None:
    hyper, gradients = Hyper(lr=0.25, momentum=0.5), [array(4), array(2)]
    (_, last), _ = run("nesterov", hyper, array(10), gradients)
    heavy_ball = f32(10) - f32(0.25) * f32(4) - f32(0.25) * f32(0.5 * 4 + 2)
    assert heavy_ball == 8
    assert last[0] == 7.5


values = hnp.arrays(f32, st.integers(1, 60), elements=st.floats(-1e6, 1e6, width=32))


@given(values, st.floats(0, 2))
def test_nesterov_with_zero_momentum_is_sgd_bit_for_bit(anchor: FloatArray, lr: float) -> None:
    gradients = [anchor[::-1] + f32(0.0), anchor * f32(0.37) + f32(0.0)]  # -0 becomes 0
    hyper = Hyper(lr=lr, momentum=0.0)
    nesterov, _ = run("nesterov", hyper, anchor, gradients)
    sgd, _ = run("sgd", hyper, anchor, gradients)
    assert all(equal_bits(a, b) for a, b in zip(nesterov, sgd, strict=True))


@given(values, st.floats(0, 10), st.floats(0, 0.99))
def test_average_ignores_lr_and_momentum(anchor: FloatArray, lr: float, momentum: float) -> None:
    gradient = anchor[::-1].copy()
    (new,), _ = run("average", Hyper(lr, momentum), anchor, [gradient])
    assert equal_bits(new, anchor - gradient)


def old_values(name: str, anchor: FloatArray) -> tuple[FloatArray, State]:
    """A gradient and a state as if after some rounds; second moments are not negative."""
    state = tuple(
        np.abs(np.roll(anchor, k)) * f32(0.01)
        for k, _ in enumerate(transform_for(name).state_names)
    )
    return anchor[::-1] * f32(0.1), state


@pytest.mark.parametrize("name", NAMES)
@given(anchor=values, data=st.data())
def test_update_cell_by_cell_is_update_of_the_whole(
    name: str, anchor: FloatArray, data: st.DataObject
) -> None:
    update, hyper = transform_for(name).update, Hyper(lr=0.7, momentum=0.9)
    gradient, state = old_values(name, anchor)
    cuts = data.draw(st.lists(st.integers(0, anchor.size), max_size=6).map(sorted))
    whole, by_cell = np.empty_like(anchor), np.empty_like(anchor)
    whole_state: State = tuple(np.empty_like(anchor) for _ in state)
    cell_state: State = tuple(np.empty_like(anchor) for _ in state)
    update(anchor, gradient, state, hyper, whole, whole_state)
    for start, end in zip([0, *cuts], [*cuts, anchor.size], strict=True):
        at = slice(start, end)
        update(
            anchor[at],
            gradient[at],
            tuple(s[at] for s in state),
            hyper,
            by_cell[at],
            tuple(s[at] for s in cell_state),
        )
    assert equal_bits(whole, by_cell)
    assert all(equal_bits(a, b) for a, b in zip(whole_state, cell_state, strict=True))


@pytest.mark.parametrize("name", NAMES)
@given(anchor=values)
def test_update_never_modifies_its_inputs(name: str, anchor: FloatArray) -> None:
    gradient, state = old_values(name, anchor)
    inputs = (anchor, gradient, *state)
    before = [a.tobytes() for a in inputs]
    for a in inputs:
        a.flags.writeable = False
    new_state: State = tuple(np.empty_like(anchor) for _ in state)
    hyper = Hyper(lr=0.7, momentum=0.9)
    transform_for(name).update(anchor, gradient, state, hyper, np.empty_like(anchor), new_state)
    assert [a.tobytes() for a in inputs] == before


@pytest.mark.parametrize("name", NAMES)
def test_a_transform_is_found_by_its_name(name: str) -> None:
    assert transform_for(name).name == name


def test_an_unknown_optimizer_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(ValueError, match="adamw") as refusal:
        transform_for("adamw")
    assert all(name in str(refusal.value) for name in NAMES)
