"""The phase is a pure function of the round number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outer_optimizer.schedule import Phase, phase_at


def phases(*starts: int) -> list[Phase]:
    return [Phase(start, 20, 0.7, 0.9) for start in starts]


@given(st.sets(st.integers(1, 1000), max_size=8), st.integers(0, 2000))
def test_the_last_phase_that_has_begun_holds(later: set[int], round_: int) -> None:
    starts = [0, *sorted(later)]
    phase = phase_at(phases(*starts), round_)
    assert phase.from_round == max(start for start in starts if start <= round_)


def test_a_phase_holds_from_its_first_round_on() -> None:
    schedule = [Phase(0, 5, 1.0, 0.0), Phase(25, 20, 0.7, 0.9)]
    assert [phase_at(schedule, round_).inner_steps for round_ in (0, 24, 25, 26)] == [5, 5, 20, 20]


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 5, 5), (0, 5, 3), (-1, 0)])
def test_phases_that_do_not_start_at_0_and_rise_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rise strictly"):
        phase_at(phases(*starts), 10)
