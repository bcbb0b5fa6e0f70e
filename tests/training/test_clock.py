"""Training by the clock: time in records, resumed, and schedules that do not wait."""

import warnings
from pathlib import Path
from typing import Any

import matplotlib.pyplot as pyplot
import numpy as np
import pytest
import torch

from fedshuffle import Federation, FedShuffleError, LocalWork, Privacy, audit, losses, train
from fedshuffle.auditing import contributions
from fedshuffle.config import load
from fedshuffle.local_work import EpochRange
from fedshuffle.timing import Clock, Exponential
from fedshuffle.training.rounds import Run
from tests.config.project import CONFIG, MODULE

CLIENTS = Federation.from_arrays(torch.ones(10, 1), torch.eye(10), sizes=[1, 2, 3, 4])
CLOCK = Clock([0.4, 0.3, 0.2, 0.1], jitter=Exponential(), latency=0.1)
SETTINGS: dict[str, Any] = {"loss": losses.squared_error, "step_size": 0.1, "sampling": "uniform:2"}
SCHEDULES = ["deadline:0.8", "deadline:0.8+partial", "over:2of3"]


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(1, 10, bias=False)


def trained(**settings: Any) -> Any:
    return train(model(), CLIENTS, **{"rounds": 6, "clock": CLOCK, **SETTINGS, **settings})


def same(one: Any, other: Any) -> bool:
    return torch.equal(one.model.weight, other.model.weight)


def test_a_clock_alone_changes_nothing_but_tells_the_time() -> None:
    found = trained(record_cohorts=True)
    assert same(found, trained(clock=None))
    assert "time" not in trained(clock=None).history[0]
    time = 0.0
    for round, record in enumerate(found.history):
        cohort = np.array(record["cohort"])
        time += CLOCK.durations(0, round, cohort, CLIENTS.sizes[cohort]).max()
        assert record["time"] == time


def test_a_late_deadline_waits_for_all_and_an_early_one_for_none() -> None:
    waits = trained()
    late = trained(schedule="deadline:1000")
    assert same(late, waits)
    assert late.history[-1]["time"] == waits.history[-1]["time"]
    early = trained(schedule="deadline:0.8", rounds=30)
    spans = np.diff([0, *(record["time"] for record in early.history)])
    missing = [record["clients"] < 2 for record in early.history]
    assert 0 < sum(missing) < 30
    np.testing.assert_allclose(spans[missing], 0.8)
    assert (spans[~np.array(missing)] < 0.8).all()


def test_over_selection_ends_with_the_last_update_that_is_taken() -> None:
    found = trained(schedule="over:2of3", record_cohorts=True, sampling="full")
    [*_, last], before = found.history, found.history[-2]["time"]
    cohort = np.array(last["cohort"])
    span = CLOCK.durations(0, 5, cohort, CLIENTS.sizes[cohort]).max()
    assert last["time"] - before == pytest.approx(span)


@pytest.mark.parametrize("schedule", [None, "deadline:0.8+partial"])
def test_resuming_keeps_the_time_bit_for_bit(schedule: str | None, tmp_path: Path) -> None:
    settings = {"schedule": schedule, "method": "fedshuffle-gen"}
    whole = trained(**settings)
    part = settings | {"out": tmp_path / "run"}
    trained(rounds=3, **part)
    found = trained(resume=True, **part)
    assert same(found, whole)
    assert [r["time"] for r in found.history] == [r["time"] for r in whole.history]
    with pytest.raises(FedShuffleError, match="was started with other times"):
        trained(resume=True, rounds=7, **part, clock=CLOCK.changed(latency=0.2))


@pytest.mark.parametrize("schedule", [None, "deadline:100", "over:4of4"])
def test_compression_shortens_the_round(schedule: str | None) -> None:
    """Updates of 40 bytes, or 20 in half precision, at 10 bytes per second."""
    clock = Clock([1.0], latency=2, up=10.0)
    settings = {"clock": clock, "schedule": schedule, "rounds": 1, "sampling": "full"}
    plain, half = trained(**settings), trained(**settings, channel="float16")
    assert plain.history[0]["time"] == pytest.approx(2 + 4 + 4)
    assert half.history[0]["bytes_up"] < plain.history[0]["bytes_up"]
    sent = half.history[0]["bytes_up"] / 4
    assert half.history[0]["time"] == pytest.approx(2 + 4 + sent / 10)


@pytest.mark.parametrize(
    ("method", "trips", "gradients", "full"),
    [("fedshuffle", 1, 1, 0), ("mime", 2, 2, 1), ("fedlin", 2, 1, 2), ("fedshuffle-mvr", 2, 2, 2)],
)
@pytest.mark.parametrize("schedule", ["wait", "deadline:100", "over:4of4"])
def test_methods_take_the_time_of_all_that_they_compute(
    method: str, trips: int, gradients: int, full: int, schedule: str
) -> None:
    """Client 3 is the slowest: 8 steps, and an epoch of 4 for each full gradient."""
    clock = Clock([1.0], latency=0.5)
    settings = {"method": method, "schedule": schedule, "clock": clock, "sampling": "full"}
    found = trained(**settings, work=LocalWork(epochs=2), rounds=1)
    want = trips * 0.5 + gradients * 8 + full * 4
    assert found.history[0]["time"] == pytest.approx(want)


def test_optimal_sampling_asks_once_more() -> None:
    found = trained(clock=Clock([1.0], latency=0.5), sampling="optimal:2", rounds=1)
    assert found.history[0]["time"] == pytest.approx(2 * 0.5 + 4)


def test_who_is_in_time_depends_on_what_a_method_computes() -> None:
    clock = Clock([1.0], jitter=Exponential(), latency=0.5)
    slow = audit(CLIENTS, "mime", schedule="deadline:4", clock=clock).inclusion_probabilities
    np.testing.assert_allclose(slow, -np.expm1(-(4 - 2 * 0.5) / (3 * CLIENTS.sizes)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("epochs", [1, EpochRange(1, 2)])
def test_fedshuffle_is_unbiased_over_rounds(schedule: str, epochs: Any) -> None:
    """The mean contribution of a client over many rounds is its weight times that of all."""
    method = "fedshuffle-gen" if "partial" in schedule else "fedshuffle"
    run = Run(CLIENTS, method, work=LocalWork(epochs=epochs), schedule=schedule, clock=CLOCK)
    rounds, moved = 600, np.zeros((600, 4))
    for round in range(rounds):
        cohort = run.cohort(round)
        moved[round, cohort.clients] = contributions(run.method, cohort)
    want = CLIENTS.weights * run.workload.max_steps
    p = run.sampling.p
    error = want * np.sqrt((1 - p) / p / rounds)  # a client that takes part counts the same
    assert (np.abs(moved.mean(axis=0) - want) < 4.5 * error).all()


@pytest.mark.parametrize("method", ["fedshuffle", "fedadam+fedshuffle"])
def test_unfinished_work_that_is_not_corrected_for_is_a_warning(method: str) -> None:
    """As the audit finds it; the remedy that is named is none."""
    settings: dict[str, Any] = {"schedule": "deadline:0.8+partial", "rounds": 1}
    with pytest.warns(UserWarning, match="slow ones count less") as said:
        trained(method=method, **settings)
    assert len(said) == 1
    remedy = method.replace("+fedshuffle", "") + "+fedshuffle-gen"
    remedy = "fedshuffle-gen" if method == "fedshuffle" else remedy
    assert f"Use method {remedy}," in str(said[0].message)
    trained(method=remedy, **settings)
    with pytest.warns(UserWarning, match=r"Leave out '\+partial'"):
        trained(method=method, **settings, privacy=Privacy(clip=1.0, noise=1.0))
    trained(method=method, schedule="deadline:1000+partial", rounds=1)  # nobody is late
    trained(method=method, schedule="deadline:0.8", rounds=1)  # late ones send nothing


@pytest.mark.parametrize("method", ["mifa", "fedvarp", "mime-lite", "scaffold", "fedlin", "mime"])
def test_who_is_warned_of_unfinished_work_is_helped_by_the_remedy(method: str) -> None:
    """As the audit finds it: control variates need no help, and full gradients of the cohort, which
    depend on who else is there, get none from it.
    """
    settings: dict[str, Any] = {"schedule": "deadline:0.8+partial", "clock": CLOCK, "draws": 3200}
    before, after = (
        audit(CLIENTS, f"{method}+{other}", **settings).total_variation
        for other in ("fedshuffle", "fedshuffle-gen")
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(method=f"{method}+fedshuffle", schedule=settings["schedule"], rounds=1)
    assert bool(said) == (after < before - 1e-4)
    assert not said or after < 1e-12


def test_estimated_probabilities_follow_who_is_in_time() -> None:
    settings = {"schedule": "deadline:0.8", "clock": CLOCK, "sampling": "full"}
    run = Run(CLIENTS, "fedau", **settings)  # type: ignore[arg-type]
    for round in range(300):
        cohort = run.cohort(round)
    known = run.sampling.p[cohort.clients]
    assert (np.abs(cohort.probability - known) < 0.35 * known + 0.1).all()
    found = trained(schedule="deadline:0.8", probabilities="estimate", rounds=3)
    assert np.isfinite(found.history[-1]["train_loss"])


def test_a_config_names_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "devices.csv").write_text("client,seconds\n")
    config = load(tmp_path / "config.toml", {"rounds": 2, "clock": "fixed:0.5"})
    assert config.run(tmp_path / "out").history[-1]["time"] > 0
    measured = load(tmp_path / "config.toml", {"clock": "table:devices.csv"})
    with pytest.raises(FedShuffleError, match=r"^clock .*devices\.csv"):
        measured.run(tmp_path / "other")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "deadline:1", "clock": None}, "'deadline:1' goes by time, and there is no"),
        ({"method": "pooled-sgd", "sampling": "full"}, "leave out the clock"),
        (
            {"schedule": "deadline:9", "clock": "fixed:0.1+down:9", "down_channel": "qsgd:4"},
            "leave out the down channel",
        ),
        ({"schedule": "deadline:0.1"}, "never in time"),
    ],
)
def test_bad_input(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        trained(**settings)


def test_plots_over_time() -> None:
    found = trained()
    drawn = found.plot("train_loss", over="time").get_lines()[0].get_xdata()
    assert list(drawn) == [record["time"] for record in found.history]
    with pytest.raises(FedShuffleError, match="has no time"):
        trained(clock=None).plot(over="time")
    pyplot.close("all")
