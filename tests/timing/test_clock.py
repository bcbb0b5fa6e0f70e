"""Clocks: durations are pure, have the stated distribution, and bad input has one clear error."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import Federation
from fedshuffle.errors import FedShuffleError
from fedshuffle.timing import (
    Clock,
    Exponential,
    LogNormal,
    MessageSizes,
    NoJitter,
    parse_clock,
    parse_schedule,
    resolve_clock,
)

PAIR = Federation.from_sizes([1, 2])
JITTERS = [NoJitter(), Exponential(), LogNormal(0.5)]


@pytest.mark.parametrize("jitter", JITTERS[1:], ids=repr)
@given(u=st.floats(0, 1, exclude_max=True).filter(lambda u: u > 1e-12))
def test_quantile_inverts_distribution(jitter: Exponential | LogNormal, u: float) -> None:
    found = jitter.cdf(jitter.quantile(np.array([u])))
    np.testing.assert_allclose(found, u, rtol=1e-9)


@pytest.mark.parametrize("jitter", JITTERS, ids=repr)
def test_jitter_has_mean_one(jitter: NoJitter | Exponential | LogNormal) -> None:
    grid = (np.arange(200_000) + 0.5) / 200_000
    assert jitter.quantile(grid).mean() == pytest.approx(1, rel=1e-3)


def test_duration_adds_network_and_computation() -> None:
    clock = Clock([0.1, 0.2], latency=[1, 2], down=[100, 50], up=[10, 5])
    found = clock.durations(0, 0, np.array([1, 0]), np.array([5, 10]), MessageSizes(200, 20))
    np.testing.assert_allclose(found, [2 + 4 + 4 + 1, 1 + 2 + 2 + 1])


def test_in_time_is_the_share_of_durations() -> None:
    clock = Clock(np.full(20_000, 0.1), jitter=LogNormal(1.0), latency=0.5)
    everyone = np.arange(20_000)
    steps = np.full(20_000, 10)
    share = (clock.durations(3, 7, everyone, steps) <= 1.2).mean()
    assert share == pytest.approx(clock.in_time(1.2, everyone[:1], steps[:1])[0], abs=0.015)


@given(st.integers(1, 50), st.floats(0.01, 10))
def test_steps_by_a_deadline_that_is_exact(steps: int, seconds: float) -> None:
    """Rounding does not cost the last step, and the task is in time."""
    clock, one = Clock([seconds]), np.arange(1)
    assert clock.steps_by(steps * seconds, 0, 0, one, np.array([99])) == steps
    assert clock.in_time(steps * seconds, one, np.array([steps])) == 1


@given(st.integers(0, 3), st.integers(0, 9), st.integers(1, 9), st.floats(0.01, 60))
def test_steps_of_dear_tasks_are_counted_one_by_one(
    gradients: int, before: int, planned: int, deadline: float
) -> None:
    clock = Clock([0.3], jitter=LogNormal(0.5), latency=0.7)
    before = max(before, 1 - gradients)  # something is computed
    clock = clock.charged(gradients, np.array([before]), trips=2)
    one, steps = np.arange(1), np.array([planned])
    whole = float(clock.durations(0, 4, one, steps)[0]) - 2 * 0.7
    factor = whole / (0.3 * (gradients * planned + before))
    ends = [1.4 + 0.3 * factor * (before + gradients * k) for k in range(1, planned + 1)]
    if min(abs(end - deadline) for end in ends) > 1e-6:
        found = clock.steps_by(deadline, 0, 4, one, steps)[0]
        assert min(max(found, 0), planned) == sum(end < deadline for end in ends)
        assert clock.finished(deadline, 0, 4, one, steps)[0] == (ends[-1] < deadline)


def test_texts() -> None:
    clients = Federation.from_sizes([1] * 4000)
    devices = parse_clock("lognormal:0.1:1", clients)
    logs = np.log(devices.seconds / 0.1)
    assert abs(logs.mean()) < 0.08
    assert logs.std() == pytest.approx(1, abs=0.05)
    classes = parse_clock("classes:0.7x0.1,0.3x1", clients)
    assert (classes.seconds == 1).sum() == 1200
    few = parse_clock("classes:0.5x1,0.25x2,0.25x3", Federation.from_sizes([1] * 4))
    assert sorted(few.seconds) == [1, 1, 2, 3]
    written_by_python = parse_clock("fixed:1e-05+down:1e+07,2e+07+latency:1e+00", PAIR)
    assert written_by_python.down.tolist() == [1e7, 2e7]
    assert parse_clock("fixed:2e+02+up:1", PAIR).seconds.tolist() == [200, 200]
    assert parse_clock(" fixed:1 + latency:2 ", PAIR).latency.tolist() == [2, 2]
    rates = parse_clock("rates:4,0.5", PAIR)
    assert rates.mean(np.arange(2), np.array([1, 9])).tolist() == [0.25, 2]


def test_table(tmp_path: Path) -> None:
    file = tmp_path / "devices.csv"
    file.write_text("client,seconds,up\n1,0.5,100\n0,0.1,200\n")
    clock = parse_clock("table:devices.csv", PAIR, tmp_path)
    assert clock.seconds.tolist() == [0.1, 0.5]
    assert clock.network(np.arange(2), MessageSizes(up=100)).tolist() == [0.5, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fixed:0.1,0.2,0.3", "3 numbers for 2 clients"),
        ("fixed:-1", "seconds of a clock: client 0 has -1"),
        ("fixed:1e-320", "client 0 has 9.99989e-321"),  # its rate is infinite
        ("fixed:fast", "write 'fixed:SECONDS'"),
        ("rates:0", "rates: client 0 has 0"),
        ("lognormal:0.1", "write 'lognormal:MEDIAN:SIGMA'"),
        ("classes:0.5x1", "sum to 0.5"),
        ("classes:0x1,1x2", "share of a device class is '0', but must be"),
        ("classes:-1x1,2x2", "share of a device class is '-1', but must be"),
        ("fixed:1+5", "write 'fixed:SECONDS'"),
        ("table:none.csv", "cannot read 'none.csv'"),
        ("sundial:1", "unknown clock 'sundial'"),
        ("fixed:1+jitter:lots", "unknown jitter"),
        ("fixed:1+jitter:lognormal:8", r"sigma .* is 8.0, but must be in \(0, 4\]"),
        ("fixed:1+wind:3", "unknown option of a clock"),
        ("fixed:1+latency:", "latency is '', but must be"),
        ("fixed:1+up:1e6+up:2e6", "up is given twice"),
        ("classes:0.999x1,0.001x-1", "must be in"),
    ],
)
def test_bad_clocks(text: str, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        resolve_clock(text, PAIR)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("client,seconds\n0,1\n1,1,5\n", "line 3.*3 values for 2 columns"),
        ("client,seconds,up,up\n0,1,2,3\n1,1,2,3\n", "the first line is"),
    ],
)
def test_bad_tables(table: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "devices.csv").write_text(table)
    with pytest.raises(FedShuffleError, match=message):
        resolve_clock("table:devices.csv", PAIR, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "wait",
        "deadline:60",
        "deadline:0.5+partial",
        "deadline:1000000.25",
        "deadline:1e+06+partial",
        "over:8of10",
        "fedasync",
        "fedasync:a=0.5",
        "fedbuff:K=10,C=100",
        "fedbuff:K=2,C=3,a=1",
        "fedbuff:K=1234567,a=0.12345678",
        "queued:C=10",
        "shuffled:K=2,C=10",
    ],
)
def test_schedules_are_written_as_they_are_read(text: str) -> None:
    assert str(parse_schedule(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fedbuff:C=3", "write fedbuff:K=10"),
        ("fedbuff:K=1.5", "buffer K is 1.5, but must be a whole number"),
        ("fedbuff:K=nan", "buffer K is nan, but must be a whole number"),
        ("fedbuff:K=inf", "buffer K is inf, but must be a whole number"),
        ("fedasync:C=2.5", "concurrency C is 2.5, but must be a whole number"),
        ("fedasync:b=1", "unknown option 'b'. Known: C, K, a"),
        ("fedbuff:K=2,K=3", "K is given twice"),
        ("fedasync:a=-1", "staleness exponent a is -1"),
        ("queued", "give the concurrency"),
        ("over:8", "write over:8of10"),
        ("deadline:soon", "write deadline:SECONDS"),
        ("deadline:0", "deadline in seconds is 0"),
        ("never", "unknown schedule"),
    ],
)
def test_bad_schedules(text: str, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        parse_schedule(text)
