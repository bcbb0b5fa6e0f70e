from __future__ import annotations

import pytest

from fedshuffle import FedShuffleError, schedules


def test_numbers_and_functions_are_schedules() -> None:
    assert schedules.value(0.5, 3, "step size") == 0.5
    assert schedules.value(lambda r: 1 / (r + 1), 3, "step size") == 0.25


def test_drops_at_half_and_three_quarters() -> None:
    schedule = schedules.drops(1.0, 1000)
    values = [schedule(r) for r in (0, 499, 500, 749, 750, 999)]
    assert values == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_inverse_time_halves() -> None:
    schedule = schedules.inverse_time(2.0, halved_after=5)
    assert [schedule(r) for r in (0, 5, 15)] == [2.0, 1.0, 0.5]


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan"), float("inf")])
def test_useless_step_sizes_are_refused(size: float) -> None:
    with pytest.raises(FedShuffleError, match="step size in round 7"):
        schedules.value(size, 7, "step size")
