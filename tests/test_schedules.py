import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import FedShuffleError, schedules


@pytest.mark.parametrize("rounds", [1, 7, 100])
def test_a_cosine_falls_from_the_step_size_to_its_end(rounds: int) -> None:
    sizes = [schedules.cosine(0.3, rounds, end=0.1)(r) for r in range(rounds + 1)]
    assert sizes[0] == pytest.approx(0.3)
    assert sizes[-1] == pytest.approx(0.03)
    assert sizes == sorted(sizes, reverse=True)
    assert np.mean(sizes[:-1] + sizes[1:]) == pytest.approx(0.3 * 1.1 / 2)  # by symmetry


def test_a_warm_up_grows_evenly_and_then_follows_the_schedule() -> None:
    warmed, plain = (schedules.resolve(f"{w}cosine:0.2", 50) for w in ("warmup:5+", ""))
    assert callable(warmed)
    assert callable(plain)
    for r in range(50):
        assert warmed(r) == pytest.approx(plain(r) * min(1, (r + 1) / 5))
    flat = schedules.resolve("warmup:4+constant:1", 50)
    assert callable(flat)
    assert [flat(r) for r in range(5)] == [0.25, 0.5, 0.75, 1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin:0.1", "Did you mean 'cosine'"),
        ("cosine", "cosine:0.1"),
        ("cosine:fast", "cosine:0.1"),
        ("cosine:1:2:3", "cosine:0.1"),
        ("warmup:0+cosine:0.1", "warm-up is 0"),
        ("warmup+cosine:0.1", "warmup:10"),
        ("inverse_time:0.1", "halved_after"),
    ],
)
def test_schedules_that_cannot_be_read_are_named(text: str, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        schedules.resolve(text, 10)


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


LAST = {
    "cosine:0.3": 0.3 * (0.01 + 0.99 * (1 + math.cos(math.pi * 0.99)) / 2),
    "drops:0.3": 0.003,
    "warmup:30+drops:0.3": 0.003,
    "inverse_time:0.3:11": 0.03,
    "warmup:7+constant:0.3": 0.3,
}
"""The step size in the last of a hundred rounds."""


@pytest.mark.parametrize("to", [1, 2, 7, 99, 100])
@pytest.mark.parametrize("text", LAST)
def test_a_shortened_schedule_is_a_straight_line_to_its_end(text: str, to: int) -> None:
    short = schedules.shortened(schedules.resolve(text, 100), 100, to)
    assert callable(short)
    line = np.linspace(0.3, LAST[text], to + 1)[:-1]
    assert [short(r) for r in range(to)] == pytest.approx(line, rel=1e-12)


def test_a_shortened_function_may_grow_and_a_number_stays() -> None:
    short = schedules.shortened(lambda round: 1.0 + round, 9, 4)
    assert callable(short)
    assert [short(r) for r in range(4)] == [1, 3, 5, 7]
    assert schedules.shortened(0.3, 100, 4) == 0.3


@given(st.sampled_from(list(LAST)), st.floats(1e-6, 1e3), st.integers(1, 100))
def test_shortened_schedules_are_positive_and_scale(text: str, size: float, to: int) -> None:
    schedule = schedules.resolve(text, 100)
    short = schedules.shortened(schedule, 100, to)
    larger = schedules.shortened(schedules.resized(schedule, size), 100, to)
    assert callable(short)
    assert callable(larger)
    for r in range(to):
        assert 0 < larger(r) == pytest.approx(size / 0.3 * short(r), rel=1e-9)


def test_steps_that_end_at_zero_are_not_zero_when_shortened() -> None:
    schedule = schedules.make("drops", {"step_size": 1.0, "factor": 0.0}, 10)
    short = schedules.shortened(schedule, 10, 4)
    assert callable(short)
    assert [short(r) for r in range(4)] == [1, 0.75, 0.5, 0.25]
