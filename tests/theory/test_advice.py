"""Advice on methods, samplings and step sizes, and the command that prints it."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedshuffle import (
    EpochRange,
    Federation,
    FedShuffleError,
    LocalWork,
    cli,
    losses,
    methods,
)
from fedshuffle._links import page
from fedshuffle.cli.advise import _advised_run
from fedshuffle.config import load
from fedshuffle.privacy.accounting import gaussian_epsilon
from fedshuffle.sampling import Full, Independent, Optimal, Uniform, among_available, parse
from fedshuffle.theory import (
    Advice,
    AdvisedRun,
    ConvergenceRate,
    MethodConstants,
    ProblemConstants,
    StepLimit,
    advise,
    best_probabilities,
    compare_steps,
    largest_step_size,
    logistic_regression_constants,
    method_constants,
    nearest_constants,
    sampling_advice,
    step_advice,
)
from fedshuffle.theory.advice import SOURCES, StepSizeSearch, search_step_sizes
from fedshuffle.theory.method_advice import KINDS, sampling_variance
from fedshuffle.theory.problem import find_problem, recognise
from tests.problems import Point, half_squared_distance
from tests.theory.test_constants_and_step_sizes import is_valid_s

ROOT = Path(__file__).parents[2]


# How much larger --------------------------------------------------------------------------------


def test_how_much_larger() -> None:
    federation = Federation.from_sizes([2, 10, 50])
    problem = ProblemConstants(L=1.0, G=1.0, B=1.2)

    def advised(method: Any, name: str) -> Any:
        setting = nearest_constants(federation, method, "uniform:2")
        return step_advice(setting, problem, method=name, regime="convex", rounds=10, start=1.0)

    mine = advised("fedshuffle", "fedshuffle")
    nova = advised("fednova-rr", "fednova-rr")
    found = compare_steps(mine, nova)
    assert found.largest_client_step == pytest.approx(found.step_size * 50 / 2)
    # FedNova with inclusion probabilities: the same limit and rate, smaller steps for the small.
    capped = advised(methods.get("fedshuffle-capped:rho=1"), "capped")
    same = compare_steps(mine, capped)
    assert same.step_size == pytest.approx(1)
    assert same.effective == pytest.approx(1)
    assert same.largest_client_step == pytest.approx(50 / 2)
    assert capped.tuned.bound <= mine.tuned.bound * (1 + 1e-9)


def test_methods_are_compared_by_the_same_variance() -> None:
    """With weights that go by steps FedNova averages as FedShuffle does, up to a factor: its M_1 is
    the same, whether it comes from a formula or from a list of cohorts.
    """
    federation = Federation.from_sizes([10, 40, 200])
    found = [
        nearest_constants(federation, name, "uniform:2")
        for name in ("fedshuffle", "fednova-rr", "fedshuffle-capped:rho=1")
    ]
    assert [one.how for one in found] == ["eigenvalue", "enumeration", "eigenvalue"]
    np.testing.assert_allclose([one.M_1 for one in found], found[0].M_1)
    assert is_valid_s(found[0].s, Uniform(3, 2))
    np.testing.assert_allclose(found[0].M_1, sampling_variance("uniform", federation, 2))


def test_settings_near_those_of_the_theorem() -> None:
    federation = Federation.from_sizes([1, 2, 3, 9], weights=[1, 1, 2, 3])
    changing = LocalWork(epochs=EpochRange(2, 5))
    ours = nearest_constants(federation, "fedshuffle", "uniform:2", changing)
    fixed = nearest_constants(federation, "fedshuffle", "uniform:2", LocalWork(epochs=2))
    assert ours.covered
    assert (ours.M_1, ours.W) == (fixed.M_1, fixed.W)
    assert ours.max_steps == 45  # step_size is still that of the client with most steps
    limits = [
        largest_step_size(found, ProblemConstants(L=1.0, P=3.0), bound="proof")
        for found in (ours, fixed)
    ]
    assert limits[0].eta_l == limits[1].eta_l
    average = nearest_constants(federation, "fedavg-rr", "uniform:2", changing)
    assert not average.covered
    assert average.tau.tolist() == [5, 10, 15, 45]

    many = Federation.from_sizes(np.arange(1, 21))
    drawn = nearest_constants(many, "fedavg-rr", "uniform:5")
    assert not drawn.covered
    assert "drawn" in drawn.notes[0]
    assert "own objective" in drawn.notes[1]
    assert not nearest_constants(many, "fedshuffle", "uniform:5").notes
    few = nearest_constants(many, "fedavg-rr", "uniform:3")  # 1140 cohorts are listed
    assert few.covered
    assert 0.3 < drawn.M_1 / few.M_1 < 1

    asked = nearest_constants(federation, "fedshuffle", "optimal:2")
    assert pytest.approx(sampling_variance("best", federation, 2)) == asked.M_1
    for sampling, method in (("optimal:1:of:uniform:2", "fedshuffle"), ("optimal:2", "fedavg-rr")):
        with pytest.raises(FedShuffleError, match="optimal"):
            nearest_constants(federation, method, sampling)
    with pytest.raises(FedShuffleError, match="2000"):
        nearest_constants(Federation.from_sizes([1] * 2000), "fedavg-rr", "uniform:100")


def test_clients_that_come_and_go_are_covered_if_their_probabilities_are_known() -> None:
    federation = Federation.from_sizes([1, 2, 3])

    def found(method: str, there: str) -> MethodConstants:
        sampling = among_available(Full(3), there, federation)
        return nearest_constants(federation, method, sampling)

    assert found("fedshuffle", "independent:0.9,0.5,0.2").covered
    for method, there, why in (
        ("fedshuffle", "markov:on=0.1,off=0.2", "independent rounds"),
        ("fedau+fedshuffle", "independent:0.9,0.5,0.2", "are estimated"),
    ):
        constants = found(method, there)
        assert not constants.covered
        assert why in constants.notes[0]
    for method in ("fedshuffle", "fedavg-rr"):
        with pytest.raises(FedShuffleError, match="client 1 never takes part"):
            found(method, "independent:0.9,0,0.2+drop")


# Sampling ---------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(2, 7))
def test_no_independent_sampling_has_less_variance_than_the_best(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    w = rng.dirichlet(np.full(n, 0.7)) + 1e-3
    w /= w.sum()
    b = int(rng.integers(1, n + 1))
    p = best_probabilities(w, b)
    assert p.sum() == pytest.approx(b)
    M = float(((1 - p) / p * w).max())  # noqa: N806
    np.testing.assert_allclose((1 - p) / p * w, M, atol=1e-9)
    for _ in range(20):
        other = np.clip(p * rng.uniform(0.3, 3, n), 1e-6, 1)
        other = np.minimum(other * min(1.0, b / other.sum()), 1)
        assert ((1 - other) / other * w).max() >= M - 1e-9
    # Optimal client sampling is for given updates at least as good, so that M serves for it too.
    zeta = rng.normal(size=(n, 2)) * rng.exponential(size=(n, 1)) ** 2
    norms = w * np.linalg.norm(zeta, axis=1)
    _, asked = Optimal(parse("full", Federation.from_sizes([1] * n)), b).select(
        norms, 0, 0, np.arange(n)
    )
    real = float(((1 / asked - 1) * norms**2).sum())
    assert real <= M * float(w @ (zeta**2).sum(1)) * (1 + 1e-9) + 1e-12


def test_samplings_and_cohorts_compared() -> None:
    federation = Federation.from_sizes([1, 2, 3, 5, 8, 13, 40, 80])
    problem = ProblemConstants(L=1.0, G=2.0, mu=0.1)
    found = method_constants(federation, "fedshuffle")
    rate = ConvergenceRate(found, problem, regime="strongly-convex")
    advice = sampling_advice(federation, rate, 3, epsilon=0.2, start=5.0)
    rounds = {option.sampling: option.rounds for option in advice.options}
    assert rounds["best"] <= rounds["importance"] < rounds["uniform"]
    for option in advice.options:  # the rounds are those of the theorem for that sampling
        assert sampling_variance(option.sampling, federation, 3) == option.M
        if option.sampling != "uniform":
            p = parse("importance:3", federation).p
            if option.sampling == "best":
                p = best_probabilities(federation.weights, 3)
            constants = method_constants(federation, "fedshuffle", Independent(p))
            own = ConvergenceRate(constants, problem, regime="strongly-convex")
            again = own.rounds_to(0.2, start=5.0)
            assert again.rounds == option.rounds
            assert again.step_size == pytest.approx(option.step_size, rel=1e-3)
    for k, kind in enumerate(KINDS):
        alone = advice.sizes[0][k].rounds
        each = [
            sampling_advice(federation, rate, b, epsilon=0.2, start=5.0).options[k].rounds
            for b in range(1, 9)
        ]
        paying = [b for b, needed in enumerate(each, 1) if alone >= b * needed / 2]
        assert advice.pays_until[kind] == max(paying)
    assert [row[0].cohort for row in advice.sizes] == [1, 2, 4, 8]
    with pytest.raises(FedShuffleError, match="cohort is 9"):
        sampling_advice(federation, rate, 9, epsilon=0.2, start=5.0)
    with pytest.raises(FedShuffleError, match="epsilon"):
        sampling_advice(federation, rate, 2, epsilon=-1.0, start=5.0)


def test_linear_speed_up_until_the_rest_takes_over() -> None:
    """With much noise rounds halve as the cohort doubles; with none they stay as they are."""
    federation = Federation.from_sizes([5] * 64)
    found = method_constants(federation, "fedshuffle")
    noisy, calm = (
        sampling_advice(
            federation,
            ConvergenceRate(found, ProblemConstants(L=1.0, G=g), regime="convex"),
            1,
            epsilon=0.01,
            start=1.0,
        )
        for g in (20.0, 0.0)
    )
    needed = [row[1].rounds for row in noisy.sizes]
    np.testing.assert_allclose(np.array(needed[:3]) / needed[1:4], 2, rtol=0.1)
    assert noisy.pays_until["importance"] > 16
    assert calm.pays_until["importance"] <= 3


# The command ------------------------------------------------------------------------------------

MODULE = """
import torch
from fedshuffle import Federation

def linear(classes=2):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, classes)).double()

def network():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

def data(numbers=False, separable=False):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    labels = torch.arange(24) % 2
    if separable:
        labels = (inputs[:, 0] > 0).long()
    if numbers:
        labels = inputs.sum(1, keepdim=True) + 1
    return Federation.from_arrays(inputs, labels, sizes=[3, 6, 15])
"""

CONFIG = """
rounds = 20
sampling = "uniform:2"
step_size = 0.01
loss = "cross_entropy"

[model]
use = "mine:linear"

[data]
use = "mine:data"

[work]
weight_decay = 0.1
batch_size = 3
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path / "config.toml"


def advised(config: Path, changes: dict[str, Any] | None = None, **options: Any) -> Advice:
    chosen = load(config, changes)
    with chosen.importable():
        return advise(_advised_run(chosen), **options)


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedshuffle", "advise", *words])
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


def step_size(limit: StepLimit) -> float:
    return limit.step_size


def without_source(found: Any, path: str = "") -> set[str]:
    """The places of floats that no part of the table of sources covers."""
    if any(path == part or path.startswith(f"{part}.") for part in SOURCES):
        return set()
    if isinstance(found, dict):
        return {
            place
            for key, value in found.items()
            for place in without_source(value, f"{path}.{key}".lstrip("."))
        }
    if isinstance(found, list):
        return {place for part in found for place in without_source(part, path)}
    return {path} if isinstance(found, float) else set()


def test_a_config_with_privacy_gets_its_cost(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config.read_text(encoding="utf-8")
    config.write_text(text + "\n[privacy]\nclip = 1.0\nnoise = 4.0\ndelta = 1e-3\n")
    words = ["--search-rounds", "0", "--set", "sampling=full"]
    assert command(monkeypatch, str(config), *words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"20 rounds cost epsilon {gaussian_epsilon(4 / 20**0.5, 1e-3):.3g}" in shown
    assert page("how-to/privacy") in shown


def test_advice_as_json(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, str(config), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "setting", "step_size_search", "problem", "steps", "step_ratios", "not_covered", "mvr",
        "mvr_notes", "largest_proven", "sampling", "consistent", "total_variation", "conclusion",
        "privacy", "sources",
    ]  # fmt: skip
    assert {source["source"] for source in found["sources"].values()} == {
        source for source, _ in SOURCES.values()
    }
    own = {"setting.step_size", "setting.server_step_size", "setting.target"}  # the config's
    assert without_source(found) == own

    problem = found["problem"]
    assert (problem["how"], problem["what"]) == ("exact", "softmax regression")
    federation = load(config).inputs().federation
    options: Any = {"l2": 0.1, "classes": 2, "bias": True, "batch_size": 3}
    exact = logistic_regression_constants(federation, form="convex", **options)
    for name in ("L", "mu", "G", "B", "delta"):
        assert problem["constants"][name]["value"] == pytest.approx(getattr(exact, name))
    rows = {(row["method"], row["regime"]): row for row in found["steps"]}
    assert len(rows) == 9
    setting = method_constants(federation, "fedshuffle", "uniform:2", load(config).work)
    setting = replace(setting, M_1=sampling_variance("uniform", federation, 2))
    for regime in ("strongly-convex", "convex"):
        limit = largest_step_size(setting, exact.problem, bound="proof")
        row = rows["fedshuffle", regime]
        assert row["covered"]
        assert row["proof"]["step_size"] == pytest.approx(limit.step_size)
        assert row["theorem"]["step_size"] < limit.step_size
        assert row["tuned"]["rounds"] == 20
    other = logistic_regression_constants(federation, form="gradient", **options)
    widest = max(limit, largest_step_size(setting, other.problem, bound="proof"), key=step_size)
    assert found["largest_proven"] == pytest.approx(widest.step_size)
    assert [row["than"] for row in found["step_ratios"][::3]] == ["fedavg-rr", "fednova-rr"]
    assert found["mvr"]["proof"]["tuned"]["a"] <= 1
    assert found["sampling"]["cohort"] == 2
    assert found["consistent"] is True


def test_advice_for_a_person(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(config), "--set", "data.numbers=true", "--set", "model.classes=1"]
    words += ["--set", "loss=squared_error", "--set", "method=fedavg-rr", "--set", "work.epochs=2"]
    assert command(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    for part in (
        "fedavg-rr on 3 clients with 24 examples",
        "The problem: linear regression",
        "exact: ",
        "strongly-convex",
        page("explanation/theory", "the-step-size-limit"),
        "FedShuffleMVR",
        "pays until",
        "of the optimum",
        "fedavg-rr is not consistent",
    ):
        assert part in said


def test_advice_by_measuring(config: Path) -> None:
    changes = {"model": "mine:network", "work.epochs": "1..2", "rounds": 4}
    found = advised(config, changes, clients=2)
    assert found.problem.how == "estimated"
    assert "not a single linear layer" in found.problem.what
    assert any("after 4 rounds" in note for note in found.problem.notes)
    assert found.problem.constants["L"].uncertainty > 0
    assert {row.regime for row in found.steps} == {"non-convex"}
    assert found.mvr
    again = advised(config, changes, clients=2, points=1)
    assert any("start only" in note for note in again.problem.notes)


def linear_run(model: nn.Module, loss: Any, data: Federation) -> AdvisedRun:
    work = LocalWork(weight_decay=0.1, batch_size=3)
    method, sampling = methods.get("fedshuffle"), parse("uniform:1", data)
    return AdvisedRun(model, loss, data, method, sampling, work, rounds=20, step_size=0.01)


def test_what_is_recognised(config: Path) -> None:
    data = load(config).inputs().federation
    linear = nn.Linear(3, 2)
    assert recognise(linear, losses.cross_entropy, data)[0] == "softmax regression"
    for model, loss, said in (
        (nn.Sequential(linear, nn.ReLU()), losses.cross_entropy, "not a single linear layer"),
        (nn.Sequential(linear, nn.Linear(2, 2)), losses.cross_entropy, "not a single linear layer"),
        (linear, losses.squared_error, "neither"),
        (nn.Linear(3, 2000), losses.cross_entropy, "more than 1000 parameters"),
    ):
        found = recognise(model, loss, data)
        assert isinstance(found, str)
        assert said in found


def test_the_start_is_that_of_the_model_with_the_regularisation(config: Path) -> None:
    data = load(config).inputs().federation
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 2)).double()
    run = linear_run(model, losses.cross_entropy, data)
    found = find_problem(run, clients=3, points=1, progress=False)
    exact = logistic_regression_constants(data, classes=2, bias=True, l2=0.1)
    x, y = (torch.as_tensor(part) for part in data.fields)
    flat = nn.utils.parameters_to_vector(model.parameters())
    # Weights go by size, so the objective is the plain mean.
    value = nn.functional.cross_entropy(model(x), y) + 0.05 * flat @ flat
    slopes = torch.autograd.grad(value, list(model.parameters()))
    start = found.start
    assert start.gap == pytest.approx(float(value.detach()) - exact.f_star)
    assert start.gradient == pytest.approx(sum(float(part.square().sum()) for part in slopes))
    away = flat.detach().numpy() - exact.x_star
    assert start.distance == pytest.approx(float(away @ away))


def test_small_models_are_measured_on_one_thread() -> None:
    data = Federation.from_arrays(torch.eye(4), torch.arange(4.0), sizes=[1, 3])
    seen = set()

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        error: torch.Tensor = model(x).squeeze(-1) - y
        return error.square().mean()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = linear_run(nn.Linear(4, 1), loss, data)
        found = find_problem(run, clients=2, points=1, progress=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert found.how == "estimated"
    assert seen == {1}


def test_classes_that_can_be_separated_are_measured(config: Path) -> None:
    found = advised(config, {"data.separable": True, "work.weight_decay": 0.0}, points=1)
    assert found.problem.how == "estimated"
    assert "separated" in found.problem.what


def test_what_is_not_covered_is_said(config: Path) -> None:
    found = advised(config, {"work.clip": 1.0, "method": "fedprox"})
    assert not found.steps
    assert "clipped" in found.not_covered["fedshuffle"]
    assert "fedprox" in found.not_covered["fedprox"]
    assert not found.mvr
    assert "epochs" in found.mvr_notes[-1]
    assert isinstance(found.sampling, str)
    assert found.largest_proven is None


def test_mistakes_of_the_command(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["nowhere.toml"], "nowhere.toml"),
        ([str(config), "--target", "2"], "target"),
        ([str(config), "--points", "0"], "points"),
        ([str(config), "--clients", "0"], "clients"),
        ([str(config), "--set", "method=fedavgg"], "fedavgg"),
    ):
        assert command(monkeypatch, *words) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_the_example_of_digits() -> None:
    found = advised(ROOT / "examples" / "digits" / "config.toml", clients=3, points=1)
    rows = {row.method: row for row in found.steps}
    assert rows["fedshuffle"].covered
    assert not rows["fedavg-rr"].covered
    assert found.consistent is True


# What can be measured -----------------------------------------------------------------------------


def descent(step_size: float, rounds: int = 4) -> StepSizeSearch:
    """Clients with one example each: gradient descent on 1/2 |x - x*|^2 and a constant."""
    points = torch.tensor([[0.0, 1.0], [2.0, 1.0], [1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    federation = Federation.from_arrays(points, sizes=[1] * 4)
    method, sampling = methods.get("fedshuffle"), parse("full", federation)
    run = AdvisedRun(
        Point(2), half_squared_distance, federation, method, sampling, LocalWork(), rounds=rounds,
        step_size=step_size,
    )  # fmt: skip
    return search_step_sizes(run, rounds=rounds)


@pytest.mark.parametrize("step_size", [0.01, 0.1, 1.0, 100.0])
def test_short_runs_find_the_stable_range_of_gradient_descent(step_size: float) -> None:
    found = descent(step_size)
    assert found.start == pytest.approx(1.5)
    for size, loss in found.tried:
        want = 0.5 + sum((1 - size) ** (2 * k) for k in (2, 3, 4)) / 3  # stable below 2
        diverged = max((1 - size) ** (2 * k) for k in range(1, 5)) + 0.5 > 15.0
        assert loss == (math.inf if diverged else pytest.approx(want, abs=1e-12))
        assert (loss <= found.start) == (size < 2)
    assert found.largest_stable == found.best == 1.0
    assert found.local_steps <= 16 * len(found.tried)
    assert descent(step_size) == found  # always the same


def test_short_runs_that_find_nothing_say_so(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = descent(1e6)
    assert min(size for size, _ in found.tried) == 1e3  # it does not go down for ever
    assert found.largest_stable is None
    assert found.best is None
    assert command(monkeypatch, str(config), "--set", "step_size=1e9") == 0
    assert "None of these step sizes" in capsys.readouterr().out


def test_what_is_measured_comes_before_what_is_proved(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, str(config), "--search-rounds", "3") == 0
    said = capsys.readouterr().out
    assert said.index("largest stable") < said.index("They differ") < said.index("What is proven")
    assert said.index("What is proven") < said.index("Step sizes (the key")
    assert command(monkeypatch, str(config), "--search-rounds", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    tried = found["step_size_search"]["tried"]
    assert found["step_size_search"]["rounds"] == 3
    assert found["step_size_search"]["best"] in [size for size, _ in tried]
    assert command(monkeypatch, str(config), "--search-rounds", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step_size_search"] is None


def test_a_cap_holds_for_drawn_epochs_too() -> None:
    clients = Federation.from_sizes([1, 10])
    work = LocalWork(epochs=EpochRange(1, 4))
    setting = nearest_constants(clients, "fedshuffle-capped:rho=2", work=work)
    limit = step_advice(setting, ProblemConstants(L=1.0), method="capped", regime="convex").proof
    assert limit.largest_client_step <= 2 * limit.step_size * (1 + 1e-12)
    assert any("step sizes" in note for note in setting.notes)
