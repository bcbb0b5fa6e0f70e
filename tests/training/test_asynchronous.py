"""Asynchronous training: its limits, its mean, its end, and resuming."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshuffle import (
    Federation,
    FedShuffleError,
    LocalWork,
    Privacy,
    audit,
    losses,
    methods,
    train,
)
from fedshuffle.engines import make
from fedshuffle.local_work import EpochRange, MissLast
from fedshuffle.sampling import Buffers
from fedshuffle.timing import Asynchronous, Clock, Exponential, LogNormal
from fedshuffle.training.rounds import Run, simulate
from tests.problems import copies, quadratic, targets, unit_vectors

torch.manual_seed(0)
CLIENTS = Federation.from_arrays(torch.randn(16, 4), torch.randn(16, 1), sizes=[3, 5, 2, 6])
WORK = LocalWork(epochs=EpochRange(1, 2), batch_size=2)
CLOCK = Clock([0.25, 0.5, 1.0, 2.0], per="task", jitter=LogNormal(0.5))
SETTINGS: dict[str, Any] = {"loss": losses.squared_error, "work": WORK, "step_size": 0.05}


def trained(**changes: Any) -> Any:
    torch.manual_seed(1)
    return train(torch.nn.Linear(4, 1), CLIENTS, **SETTINGS | changes)


def same(a: Any, b: Any) -> bool:
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        *(("reference", "fedavg-rr"), ("reference", "fedprox"), ("reference", "fedau")),
        *(("sequential", "fedshuffle"), ("vectorized", "fedshuffle"), ("sequential:2", "fedavg")),
        ("vectorized", "fedadam+fedshuffle"),
    ],
)
def test_all_clients_at_equal_times_are_synchronous(engine: str, method: str) -> None:
    """K = C = n: bit for bit, with random epochs, a schedule of step sizes, and compression."""
    settings = {"method": method, "engine": engine, "rounds": 4, "channel": "qsgd:8"}
    settings |= {"step_size": "cosine:0.1"}
    together = trained(**settings)
    schedule, clock = Asynchronous(buffer=4, staleness=0.5), Clock([2.0] * 4, per="task")
    apart = trained(**settings, schedule=schedule, clock=clock)
    assert same(together, apart)
    assert [record["time"] for record in apart.history] == [2, 4, 6, 8]
    for one, other in zip(together.history, apart.history, strict=True):
        assert other["staleness"] == other["staleness_max"] == 0
        assert {key: other[key] for key in one if key != "seconds"} == {
            key: value for key, value in one.items() if key != "seconds"
        }


@pytest.mark.parametrize(
    ("schedule", "probabilities"),
    [("fedbuff:K=3,C=3,a=0.5", None), ("fedasync", "estimate"), ("queued:K=2,C=6,a=1", "estimate")],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, schedule: str, probabilities: str | None
) -> None:
    settings = {"schedule": schedule, "clock": CLOCK, "probabilities": probabilities}
    settings |= {"step_size": "cosine:0.1", "record_cohorts": True}
    trained(rounds=9, out=tmp_path / "run", **settings, checkpoint_every=4)
    # As if it had been killed after round 4, with updates under way.
    for file in (tmp_path / "run" / "checkpoints").glob("00000009.*"):
        file.unlink()
    settings["step_size"] = "cosine:0.1"
    resumed = trained(rounds=9, out=tmp_path / "run", resume=True, **settings)
    whole = trained(rounds=9, **settings)
    assert same(resumed, whole)
    costs = ("seconds",)
    for one, other in zip(resumed.history, whole.history, strict=True):
        assert {k: v for k, v in one.items() if k not in costs} == {
            k: v for k, v in other.items() if k not in costs
        }


@pytest.mark.parametrize(
    ("schedule", "probabilities"),
    [
        *(("fedasync:a=0.5", None), ("fedbuff:K=3,a=1", None), ("fedbuff:K=3,a=1", "estimate")),
        *(("fedbuff:K=2,C=3,a=0.5", None), ("queued:K=2,C=5,a=1", "estimate")),
        *(("shuffled:C=3,a=1", None), ("fedbuff:K=3", "estimate:ewma:0.02")),
    ],
)
def test_clients_count_by_their_weights(schedule: str, probabilities: str | None) -> None:
    """In the mean over server steps, whatever their rate and their staleness."""
    method = methods.get("fedshuffle").with_probabilities(probabilities)
    clock = Clock([0.25, 0.5, 1.0, 2.0], per="task", jitter=Exponential())
    run = Run(CLIENTS, method, schedule=schedule, clock=clock)
    assert run.asynchronous is not None
    counted, steps = np.zeros((10, 4)), 80
    for step in range(200, 200 + 10 * steps):
        cohort = run.cohort(step)
        weights = method.averaging.aggregation_weights(cohort) * run.asynchronous.factors(step)
        np.add.at(counted[(step - 200) // steps], cohort.clients, weights / steps)
    ratios = counted / CLIENTS.weights
    errors = ratios.std(axis=0, ddof=1) / np.sqrt(10)
    # A moving rate is biased by design, and estimates by counting are at first.
    slack = 0.0 if probabilities is None else 0.05
    assert (np.abs(ratios.mean(axis=0) - 1) < 5 * errors + slack).all()
    assert errors.max() < 0.2


def test_updates_start_from_the_models_and_step_sizes_of_their_time() -> None:
    """FedAsync against a loop that keeps every model."""
    points, sizes, seconds = targets(3, 2), [1, 2, 3], np.sqrt([1.0, 5.0, 47.0])
    clients = copies(sizes, points)
    engine = make("reference", quadratic(clients))

    def step_size(step: int) -> float:
        return 0.3 / (1 + step / 5)

    run = Run(
        clients,
        "fedavg-rr",
        step_size=step_size,
        schedule="fedasync:a=0.5",
        clock=Clock(seconds, per="task"),
    )
    models, started, ends = [engine.problem.start], [0, 0, 0], seconds.copy()
    for step, (state,) in enumerate(simulate(engine, [run], 30)):
        client = int(ends.argmin())
        version = started[client]
        left = (1 - step_size(version)) ** sizes[client]  # of the distance, after local training
        update = (1 - left) * (points[client] - models[version])
        models.append(models[step] + update * (1 + step - version) ** -0.5)
        torch.testing.assert_close(state.x, models[-1], rtol=0, atol=1e-12)
        started[client] = step + 1
        ends[client] += seconds[client]
    assert min(started) < step - 2  # somebody was stale


@pytest.mark.parametrize(
    ("schedule", "server_step_size", "models"),
    [
        (
            "fedbuff:K=2,a=0.5",
            2 * 2**0.5,  # K, as FLSim sums, and 2**a, as its weights are relative to staleness 1
            [
                [1.4142, 1.4142, 0, 0, 0],
                [2.4142, 1.4142, 1, 0, 0],
                [3.4142, 1.4142, 1, 0.8165, 0],
                [3.4142, 2.2307, 1, 0.8165, 0.7071],
            ],
        ),
        ("fedbuff:K=2", 2, [[3, 2, 1, 1, 1]]),  # its reduction SUM
        ("fedbuff:K=2", 1, [[1.5, 1, 0.5, 0.5, 0.5]]),  # AVERAGE
    ],
)
def test_models_are_those_of_flsim(
    schedule: str, server_step_size: float, models: list[list[float]]
) -> None:
    """Its AsyncTrainer, driven by benchmarks/async_servers.py, printed these models for clients
    that upload in this order (docs/research/async-servers.md).
    """
    problem = unit_vectors([1] * 5)
    run = Run(
        problem.federation,
        "fedavg",
        step_size=1.0,
        server_step_size=server_step_size,
        schedule=schedule,
        clock=Clock([1, 1.8, 2.2, 2.5, 3.3], per="task"),
    )
    assert [i for step in range(4) for i in run.cohort(step).clients] == [0, 1, 0, 2, 3, 0, 4, 1]
    engine = make("reference", problem)
    found = torch.stack([state.x for (state,) in simulate(engine, [run], 4)])
    np.testing.assert_allclose(found[-len(models) :], models, atol=5e-5)


@pytest.mark.parametrize("known", [False, True])
def test_the_repaired_schedule_ends_where_the_objective_is_smallest(known: bool) -> None:
    """And FedAvg where the audit says. Staleness has a formula if no times have a multiple."""
    points = targets(3, 2)
    clients = copies([1, 2, 3], points)
    engine = make("reference", quadratic(clients))
    seconds = np.sqrt([1, 0.3, 1.7]) if known else np.array([1, 0.5, 1.3])
    settings: dict[str, Any] = {"schedule": "fedbuff:K=2,a=1", "clock": Clock(seconds)}
    for method in ("fedavg-rr", "fedshuffle"):
        run = Run(clients, method, step_size=lambda r: 0.05 / (1 + r / 50), **settings)
        assert isinstance(run.sampling, Buffers)
        assert (run.sampling.staleness_weights is not None) == known
        last, state = [], run.start(engine.problem.start)
        for (state,) in simulate(engine, [run], 400):
            last.append(state.x)
        assert len(state.in_flight) <= 3
        weights = audit(clients, method, draws=100_000, **settings).effective_weights
        end = torch.stack(last[-200:]).mean(dim=0)
        np.testing.assert_allclose(end, torch.from_numpy(weights) @ points, atol=0.02)
        far = float((end - torch.tensor(clients.weights) @ points).norm())
        assert far < 0.02 if method == "fedshuffle" else far > 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "fedasync:C=9"}, r"C is 9, but there are 4 clients.*C=4"),
        ({"method": "scaffold"}, r"does not go with scaffold.*use fedshuffle"),
        ({"method": "mime"}, "does not go with mime"),
        (
            {"method": methods.get("fedshuffle").with_momentum(methods.MVR(0.1))},
            "with momentum mvr:0.1,",
        ),
        ({"sampling": "uniform:2"}, r"does not go with sampling.*leave the sampling out"),
        ({"availability": "independent:0.5"}, "does not go with availability: leave it out"),
        ({"channel": "topk:0.1+ef"}, "remember a client's earlier updates"),
        ({"down_channel": "qsgd:8"}, "does not go with a down channel"),
        ({"privacy": Privacy(clip=1, noise=1)}, "does not go with privacy"),
        ({"work": LocalWork(steps="min")}, "give every client its own epochs or steps"),
        ({"work": LocalWork(interruption=MissLast())}, "leave out one of them"),
        ({"clock": None}, "there is no clock"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        trained(**{"rounds": 1, "schedule": "fedbuff:K=2,C=3", "clock": CLOCK} | settings)


def test_no_channels_as_a_config_writes_them_are_not_refused() -> None:
    settings = {"rounds": 1, "schedule": "fedbuff:K=2,C=3", "clock": CLOCK}
    assert trained(**settings, channel="none", down_channel="none").history[-1]["round"] == 1
