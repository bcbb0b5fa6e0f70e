from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from fedshuffle import (
    MVR,
    Federation,
    FedShuffleError,
    GlobalMomentum,
    LocalWork,
    Method,
    methods,
    schedules,
    train,
)
from fedshuffle.engines import LanesEngine, LoopEngine
from fedshuffle.sampling import Independent, Table, Uniform
from fedshuffle.state import State
from fedshuffle.training import Run, play, simulate
from tests.problems import Point, copies, half_squared_distance, quadratic, targets

FEDERATION = Federation.from_arrays(targets(12, 2), sizes=[1, 2, 3, 6])


def final(**settings: object) -> torch.Tensor:
    defaults: dict[str, object] = {"rounds": 20, "sampling": "uniform:2", "seed": 1}
    result = train(
        Point(2),
        FEDERATION,
        loss=half_squared_distance,
        **(defaults | settings),  # type: ignore[arg-type]
    )
    return parameters_to_vector(result.model.parameters()).detach()


def test_same_seed_same_trajectory_bit_for_bit() -> None:
    assert torch.equal(final(), final())
    assert not torch.equal(final(), final(seed=2))
    assert torch.equal(final(engine="lanes"), final(engine="lanes"))
    torch.testing.assert_close(final(), final(engine="lanes"), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["fedshuffle-mvr", "fedavg-rr"])
def test_a_run_can_go_on_from_any_state(name: str) -> None:
    """State is all that changes: the same rounds follow from it, bit for bit."""
    run = Run(FEDERATION, name, "uniform:2", LocalWork(batch_size=2), seed=3)
    engine = LoopEngine(quadratic(FEDERATION))
    states = [states[0] for states in simulate(engine, [run], 10)]
    resumed = [states[4]]
    again = Run(FEDERATION, name, "uniform:2", LocalWork(batch_size=2), seed=3)
    for _ in range(5):
        resumed = play(engine, [again], resumed)
    assert torch.equal(resumed[0].x, states[9].x)
    assert resumed[0].round == 10
    assert resumed[0].memory.keys() == states[9].memory.keys()


def test_runs_in_lockstep_do_not_touch_each_other() -> None:
    problem = quadratic(FEDERATION)
    runs = [
        Run(FEDERATION, name, Uniform(4, b), LocalWork(batch_size=2), seed=seed)
        for name, b, seed in [("fedshuffle-mvr", 2, 1), ("fedavg", 3, 2), ("fednova-rr", 1, 2)]
    ]
    engine = LanesEngine(problem)
    *_, together = simulate(engine, runs, 8)
    for run, state in zip(runs, together, strict=True):
        *_, (alone,) = simulate(engine, [run], 8)
        torch.testing.assert_close(state.x, alone.x, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["fedshuffle", "fedavg-rr", "fedshuffle-mvr", "fednova"])
def test_an_empty_cohort_leaves_everything_as_it_is(name: str) -> None:
    sampling = Table(4, [((), 0.5), ((0, 1, 2, 3), 0.5)])
    run = Run(FEDERATION, name, sampling, seed=5)
    engine = LoopEngine(quadratic(FEDERATION))
    states = [State(engine.problem.start), *(s for (s,) in simulate(engine, [run], 30))]
    empty = 0
    for before, after in itertools.pairwise(states):
        if not len(sampling.draw(5, before.round)):
            empty += 1
            assert torch.equal(after.x, before.x)
            assert after.memory is before.memory
        else:
            assert not torch.equal(after.x, before.x)
    assert 0 < empty < 30


def test_tiny_inclusion_probabilities_make_mostly_empty_rounds() -> None:
    moved = final(sampling=Independent([1e-6] * 4), rounds=5)
    assert torch.equal(moved, torch.zeros(2, dtype=torch.float64))


def test_server_step_size_and_schedules() -> None:
    federation = copies([1], torch.ones(1, 1, dtype=torch.float64))
    engine = LoopEngine(quadratic(federation))
    # One client at 1, one step a round: x <- x + eta_g eta_l (1 - x).
    local, server = schedules.drops(0.5, 4), lambda r: 0.1 * (r + 1)
    run = Run(federation, "nastya", step_size=local, server_step_size=server)
    x = 0.0
    for r, (state,) in enumerate(simulate(engine, [run], 4)):
        x += [0.5, 0.5, 0.05, 0.005][r] * 0.1 * (r + 1) * (1 - x)
        assert float(state.x) == pytest.approx(x, rel=1e-12)


def test_nastya_and_fedrr_are_fedshuffle_for_balanced_clients() -> None:
    federation = Federation.from_arrays(targets(6, 2), sizes=[2, 2, 2])
    engine = LanesEngine(quadratic(federation))
    names = ["fedrr", "nastya", "fedshuffle", "fedavg-rr", "fednova-rr"]
    runs = [Run(federation, name, server_step_size=1.3) for name in names]
    *_, states = simulate(engine, runs, 10)
    for state in states[1:]:
        torch.testing.assert_close(state.x, states[0].x, rtol=1e-12, atol=0)


def test_a_users_method_is_one_object() -> None:
    rule = dataclasses.replace(methods.get("fedshuffle").averaging)
    mine = Method("mine", "my own", rule)
    assert torch.equal(final(method=mine), final(method="fedshuffle"))


def test_evaluation_is_called_when_asked() -> None:
    result = train(
        Point(2),
        FEDERATION,
        loss=half_squared_distance,
        rounds=7,
        evaluate=lambda model: {"norm": float(parameters_to_vector(model.parameters()).norm())},
        evaluate_every=3,
    )
    assert [record["round"] for record in result.history] == list(range(1, 8))
    assert [record["round"] for record in result.history if "norm" in record] == [3, 6, 7]
    assert all(record["clients"] == 4 and record["steps"] == 12 for record in result.history)
    assert all(record["bytes_up"] == 4 * 2 * 8 for record in result.history)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "fedshufle"}, "Did you mean 'fedshuffle'"),
        ({"sampling": "uniform:9"}, "cannot take 9 of 4"),
        ({"sampling": Uniform(5, 2)}, "5 clients, but the federation has 4"),
        ({"step_size": 0.0}, "step size in round 0 is 0"),
        ({"step_size": float("nan")}, "step size in round 0 is nan"),
        ({"server_step_size": -1.0}, "server step size in round 0 is -1"),
        ({"step_size": lambda r: 0.1 - 0.05 * r}, "step size in round 2"),
        ({"seed": -1}, "seed -1"),
        ({"rounds": 0}, "rounds is 0"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"engine": "warp"}, "unknown engine"),
        ({"engine": None}, "engine must be of type str"),
        ({"engine": "lean:x"}, "write 'lean:2'"),
        ({"engine": "lean:0"}, "workers is 0"),
        ({"sampling": 2}, "sampling must be of type Sampling"),
        ({"sampling": None}, "sampling must be of type Sampling"),
        ({"work": {}}, "work must be of type LocalWork"),
        ({"method": 5}, "method must be of type str"),
        ({"step_size": "fast"}, "must be a number"),
        ({"evaluate": lambda model: {"round": 1}}, "may not return 'round'"),
        ({"evaluate": lambda model: {"loss": "low"}}, "metric 'loss'"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        final(**settings)


@pytest.mark.parametrize(
    "momentum", [None, MVR(0.2), GlobalMomentum(0.2)], ids=["plain", "mvr", "g"]
)
def test_weight_decay_is_part_of_the_objective(momentum: MVR | GlobalMomentum | None) -> None:
    """With 1/2 |x - b|^2 + lambda/2 |x|^2 at every client the optimum shrinks by 1 + lambda."""
    points = targets(2, 2)
    federation = copies([2, 2], points)
    method = methods.get("fedshuffle").with_momentum(momentum)
    run = Run(federation, method, "full", LocalWork(weight_decay=0.5), 0.01, 1.0, 0)
    *_, (state,) = simulate(LanesEngine(quadratic(federation)), [run], 3000)
    torch.testing.assert_close(state.x, points.mean(0) / 1.5, rtol=0, atol=1e-6)
