"""Each outer optimizer is its paper's rule, to the bit where the arithmetic is exact."""

import numpy as np
import pytest

from outer_optimizer.optimizer import transform_for
from outer_optimizer.transform import FloatArray, Hyper, OuterTransform, State

NAMES = ("average", "sgd", "nesterov", "adam", "yogi")


def start(transform: OuterTransform, values: int) -> State:
    state = tuple(np.full(values, np.nan, np.float32) for _ in transform.state_names)
    transform.init(state)
    return state


def step(
    transform: OuterTransform, anchor: FloatArray, gradient: FloatArray, state: State, hyper: Hyper
) -> tuple[FloatArray, State]:
    new_anchor = np.full_like(anchor, np.nan)
    new_state = tuple(np.full_like(array, np.nan) for array in state)
    transform.update(anchor, gradient, state, hyper, new_anchor, new_state)
    return new_anchor, new_state


def follow(name: str, hyper: Hyper, gradients: list[float]) -> list[list[float]]:
    """[anchor, *state] after each round, from anchor 1."""
    transform = transform_for(name)
    anchor, state, path = np.ones(1, np.float32), start(transform, 1), []
    for gradient in gradients:
        anchor, state = step(transform, anchor, np.array([gradient], np.float32), state, hyper)
        path.append([float(array[0]) for array in (anchor, *state)])
    return path


def wave(values: int, factor: int) -> FloatArray:
    """Values in [-1, 1) that differ, some negative, some equal to 0."""
    return (np.arange(values, dtype=np.int64) * factor % 2048 - 1024).astype(
        np.float32
    ) / np.float32(1024)


def rounds_of(name: str, values: int) -> tuple[OuterTransform, FloatArray, FloatArray, State]:
    """A transform after one round, so that no state is trivial, and the next gradient."""
    transform = transform_for(name)
    anchor, state = step(
        transform, wave(values, 37), wave(values, 101), start(transform, values), Hyper(0.7, 0.9)
    )
    return transform, anchor, wave(values, 59), state


def test_sgd_steps_down_the_gradient() -> None:
    # 1 - 0.25*1 = 0.75;  0.75 - 0.25*2 = 0.25
    assert follow("sgd", Hyper(lr=0.25), [1.0, 2.0]) == [[0.75], [0.25]]


def test_average_ignores_every_setting() -> None:
    # 1 - 1 = 0;  0 - 2 = -2
    assert follow("average", Hyper(lr=0.25, momentum=0.5), [1.0, 2.0]) == [[0.0], [-2.0]]


def test_nesterov_looks_ahead_with_the_updated_buffer() -> None:
    # b = 0.5*0 + 1 = 1;    1 - 0.25*(1 + 0.5*1) = 0.625
    # b = 0.5*1 + 2 = 2.5;  0.625 - 0.25*(2 + 0.5*2.5) = -0.1875
    path = follow("nesterov", Hyper(lr=0.25, momentum=0.5), [1.0, 2.0])
    assert path == [[0.625, 1.0], [-0.1875, 2.5]]


def test_nesterov_is_not_heavy_ball() -> None:
    # Heavy ball, anchor - lr*b:  1 - 0.25*1 = 0.75;  0.75 - 0.25*2.5 = 0.125
    path = follow("nesterov", Hyper(lr=0.25, momentum=0.5), [1.0, 2.0])
    assert [round_[0] for round_ in path] != [0.75, 0.125]


def test_nesterov_rounds_its_settings_and_every_operation_to_fp32() -> None:
    lr, mu, g, h = (np.float32(x) for x in (0.7, 0.9, 0.3, -0.2))
    first = np.float32(1) - (g * mu + g) * lr
    second = first - ((g * mu + h) * mu + h) * lr
    path = follow("nesterov", Hyper(lr=0.7, momentum=0.9), [0.3, -0.2])
    assert path == [[first, g], [second, g * mu + h]]


def test_nesterov_without_momentum_is_sgd() -> None:
    gradients = [0.3, -0.7, 0.11]
    nesterov, sgd = (follow(name, Hyper(lr=0.7), gradients) for name in ("nesterov", "sgd"))
    assert [round_[0] for round_ in nesterov] == [round_[0] for round_ in sgd]


def test_adam_two_steps() -> None:
    # v = 0.5*0.25 + 0.5*0.25 = 0.25;   m = 0.5*0 + 0.5*0.5 = 0.25;      1 - 2*0.25/(0.5 + 0.5) = 0.5
    # v = 0.5*0.25 + 0.5*12.25 = 6.25;  m = 0.5*0.25 + 0.5*3.5 = 1.875;  0.5 - 2*1.875/(2.5 + 0.5) = -0.75
    hyper = Hyper(lr=2.0, beta1=0.5, beta2=0.5, epsilon=0.5)
    assert follow("adam", hyper, [0.5, 3.5]) == [[0.5, 0.25, 0.25], [-0.75, 1.875, 6.25]]


def test_yogi_two_steps() -> None:
    # v = 0.25 - 0.5*0.25*0 = 0.25;  m = 0.5*0 + 0.5*0.5 = 0.25;    1 - 2*0.25/(0.5 + 0.5) = 0.5
    # v = 0.25 + 0.5*4 = 2.25;       m = 0.5*0.25 + 0.5*2 = 1.125;  0.5 - 2*1.125/(1.5 + 0.5) = -0.625
    hyper = Hyper(lr=2.0, beta1=0.5, beta2=0.5, epsilon=0.5)
    assert follow("yogi", hyper, [0.5, 2.0]) == [[0.5, 0.25, 0.25], [-0.625, 1.125, 2.25]]


def test_yogi_forgets_by_the_size_of_the_gradient_and_adam_by_a_factor() -> None:
    # From v = 2.25 and g = 0.5:  yogi 2.25 - 0.5*0.25 = 2.125;  adam 0.5*2.25 + 0.5*0.25 = 1.25
    hyper = Hyper(lr=1.0, beta1=0.5, beta2=0.5, epsilon=0.5)
    anchor, gradient = np.ones(1, np.float32), np.full(1, 0.5, np.float32)
    state = (np.zeros(1, np.float32), np.full(1, 2.25, np.float32))
    assert step(transform_for("yogi"), anchor, gradient, state, hyper)[1][1] == 2.125
    assert step(transform_for("adam"), anchor, gradient, state, hyper)[1][1] == 1.25


@pytest.mark.parametrize("epsilon", [1e-8, 1e-3, 0.1])
def test_the_second_moment_starts_at_epsilon_squared(epsilon: float) -> None:
    # No gradient: adam keeps 0.5 epsilon^2, yogi all of it.
    hyper = Hyper(lr=1.0, beta2=0.5, epsilon=epsilon)
    square = np.float32(epsilon) * np.float32(epsilon)
    assert follow("adam", hyper, [0.0])[0][2] == square / 2
    assert follow("yogi", hyper, [0.0])[0][2] == square


@pytest.mark.parametrize("name", ["average", "sgd", "nesterov"])
def test_one_island_without_momentum_and_lr_1_gets_its_own_parameters(name: str) -> None:
    transform = transform_for(name)
    anchor, local = wave(1000, 37), wave(1000, 101)  # their differences are exact in fp32
    gradient = anchor - local
    new_anchor, _ = step(transform, anchor, gradient, start(transform, 1000), Hyper(lr=1.0))
    assert new_anchor.tobytes() == local.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_cell_by_cell_is_the_whole_bit_for_bit(name: str) -> None:
    transform, anchor, gradient, state = rounds_of(name, 1000)
    hyper = Hyper(0.7, 0.9)
    whole = step(transform, anchor, gradient, state, hyper)
    cells = [slice(0, 1), slice(1, 514), slice(514, 1000)]
    parts = [
        step(transform, anchor[at], gradient[at], tuple(array[at] for array in state), hyper)
        for at in cells
    ]
    assert np.concatenate([part[0] for part in parts]).tobytes() == whole[0].tobytes()
    for number, array in enumerate(whole[1]):
        together = np.concatenate([part[1][number] for part in parts])
        assert together.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_inputs_stay_as_they_are(name: str) -> None:
    transform, anchor, gradient, state = rounds_of(name, 1000)
    before = [array.tobytes() for array in (anchor, gradient, *state)]
    for array in (anchor, gradient, *state):
        array.flags.writeable = False
    step(transform, anchor, gradient, state, Hyper(0.7, 0.9))
    assert [array.tobytes() for array in (anchor, gradient, *state)] == before


@pytest.mark.parametrize("name", NAMES)
def test_everything_stays_finite_fp32_without_a_gradient(name: str) -> None:
    transform, anchor, gradient, state = rounds_of(name, 1000)
    new_anchor, new_state = step(
        transform, anchor, np.zeros_like(gradient), state, Hyper(0.7, 0.9, epsilon=1e-30)
    )
    for array in (new_anchor, *new_state):
        assert array.dtype == np.float32
        assert np.isfinite(array).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_transform_is_found_by_its_name(name: str) -> None:
    assert transform_for(name).name == name


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'lamb': nesterov, sgd, average, adam or yogi"):
        transform_for("lamb")
