"""Local optimisers: how they are written, how far their steps go, and what the audit says."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedshuffle import (
    Federation,
    FedShuffleError,
    LocalWork,
    MissLast,
    audit,
    audit_server,
    fingerprint,
    losses,
    methods,
    train,
)
from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.simulation import QuadraticClients
from fedshuffle.cli import app
from fedshuffle.config import loader, writer
from fedshuffle.local_optimisers import LocalOptimiser
from fedshuffle.methods import Cohort
from fedshuffle.sampling import resolve
from fedshuffle.theory import method_constants
from fedshuffle.training.rounds import Run

TEXTS = ["sgd", "sgd:momentum=0.9,nesterov=true", "adamw:weight_decay=0.1,beta1=0.95", "rmsprop"]
CLIENTS = Federation.from_sizes([1, 2, 4, 5], [0.1, 0.3, 0.4, 0.2])


class Twice(torch.optim.Optimizer):
    """A class of the user's that is linear: its first step is twice as long."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.first = 2.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.first * self.param_groups[0]["lr"])
        self.first = 1.0


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_read_and_written(text: str) -> None:
    found = LocalOptimiser.read(text)
    assert str(found) == text
    assert LocalOptimiser.read(str(found)) == found
    assert hash(LocalOptimiser.read(text)) == hash(found)


def test_classes_of_torch_go_by_their_name() -> None:
    given = LocalOptimiser(torch.optim.AdamW, {"betas": (0.8, 0.95), "weight_decay": 0})
    assert given == LocalOptimiser.read("adamw:weight_decay=0.0,beta1=0.8,beta2=0.95")
    assert LocalWork(optimiser=torch.optim.SGD).optimiser == LocalOptimiser("sgd")
    assert LocalOptimiser.read(" AdamW : beta1 = 0.8 ") == LocalOptimiser("adamw", {"beta1": 0.8})
    whole, real = (LocalOptimiser("rmsprop", {"alpha": one}) for one in (1, 1.0))
    assert whole == real
    assert hash(whole) == hash(real)
    made: Any = given.make([torch.zeros(2)], 0.5)
    group = made.param_groups[0]
    assert isinstance(made, torch.optim.AdamW)
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.8, 0.95), 0)


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("adamv", {}, "unknown local optimiser 'adamv'. Did you mean 'adam'"),
        ("adam", {"momentum": 0.9}, "unknown option of the local optimiser 'adam' 'momentum'"),
        ("adam", {"beta1": 1.0}, r"beta1 of the local optimiser 'adam' is 1.0, .* in \[0, 1\)"),
        ("adam", {"weight_decay": 0.1}, r"LocalWork\(weight_decay=...\), or use 'adamw'"),
        ("sgd", {"nesterov": True}, "nesterov .* needs momentum"),
        ("sgd", {"nesterov": 1, "momentum": 0.9}, "nesterov .* must be of type bool"),
        ("sgd", {"lr": 0.1}, "lr of the local optimiser is set by the run"),
        ("rmsprop", {"alpha": "x"}, "alpha .* must be a number"),
        (torch.optim.LBFGS, {}, "LBFGS cannot be used: its step needs a closure"),
        (torch.optim.SparseAdam, {}, "it wants sparse gradients"),
        (dict, {}, "derives from torch.optim.Optimizer"),
        (3, {}, "the local optimiser is of type int"),
        ("adam", {"betas": 0.9}, "betas .* is 0.9: give a pair"),
        ("adam", {"betas": (0.9, 0.99), "beta1": 0.5}, "give a pair, or beta1 and beta2"),
        ("adam", ["beta1"], "options of the local optimiser must be of type Mapping"),
    ],
)
def test_what_cannot_be_is_refused(kind: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(FedShuffleError, match=says):
        LocalOptimiser(kind, options)


def test_broken_texts_and_options_of_torch_are_refused_before_training() -> None:
    for text in ("adam:beta1", "adam:beta1=0.5,beta1=0.6", "adam:", "adamw:betas=(0.9,0.95)"):
        with pytest.raises(FedShuffleError, match=r"cannot be read.*beta1=0\.95"):
            LocalOptimiser.read(text)
    for text in ("rmsprop:alpha=-1", "rmsprop:beta=0.5"):
        with pytest.raises(FedShuffleError, match=r"the local optimiser rmsprop.* cannot be made"):
            Run(CLIENTS, "fedshuffle", work=LocalWork(optimiser=text))


class Rebinds(torch.optim.Optimizer):
    """Gives p.data a new tensor, which the model would not see."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data = p.data - self.param_groups[0]["lr"] * p.grad


class Demands(Rebinds):
    """Calls a closure that it says it does not need."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()


@pytest.mark.parametrize(
    ("optimiser", "says"),
    [
        (Rebinds, r"Rebinds does not descend: .* 8 steps of size one go 0 far.*in place"),
        (Demands, r"Demands cannot make a step: 'NoneType' object is not callable"),
        ("rmsprop:maximize=true", r"rmsprop:maximize=true does not descend: .* go -"),
    ],
)
def test_an_optimiser_that_would_not_train_is_refused(optimiser: Any, says: str) -> None:
    with pytest.raises(FedShuffleError, match=says):
        Run(CLIENTS, "fedavg", work=LocalWork(optimiser=optimiser))


# Lengths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["sgd", "sgd:momentum=0.9", "sgd:momentum=0.6,nesterov=true", "sgd:momentum=0.5,dampening=0.3"],
)
def test_the_length_of_momentum_is_that_of_torch(text: str) -> None:
    optimiser, steps = LocalOptimiser.read(text), np.array([1, 2, 7, 40])
    y = torch.zeros(1, dtype=torch.float64)
    made, walked = optimiser.make([y], 1.0), [0.0]
    for _ in range(40):
        y.grad = torch.ones_like(y)
        made.step()
        walked.append(float(-y))
    np.testing.assert_allclose(optimiser.lengths(steps), np.array(walked)[steps], rtol=1e-12)
    assert (optimiser.linear, optimiser.gain) == (True, 2.0)


def test_lengths_of_other_optimisers_are_measured() -> None:
    steps = np.array([1, 3, 5000])
    assert LocalOptimiser("adamw").lengths(steps).tolist() == [1, 3, 5000]
    np.testing.assert_allclose(LocalOptimiser(Twice).lengths(steps), steps + 1, rtol=1e-9)
    by_root = 1 / np.sqrt(1 - 0.9 ** np.arange(1, 4))
    found = LocalOptimiser.read("rmsprop:alpha=0.9").lengths(np.arange(1, 4))
    np.testing.assert_allclose(found, np.cumsum(by_root), rtol=1e-6)


def test_linearity_and_gain_are_measured() -> None:
    assert (LocalOptimiser(Twice).linear, LocalOptimiser(Twice).gain) == (True, 2.0)
    for text in ("rmsprop", "adagrad", "rprop", "adafactor", "muon"):
        optimiser = LocalOptimiser.read(text)
        assert not optimiser.linear
        assert optimiser.gain == pytest.approx(1.0, abs=1e-3)


# The audit ----------------------------------------------------------------------------------------


def mean_moves(method: str, sampling: str, work: LocalWork) -> FloatArray:
    """How far linear clients move the model along their gradients: the training code over every
    cohort, with torch's own optimisers.
    """
    run = Run(CLIENTS, method, sampling, work, step_size=2.0**-20)
    clients, start = QuadraticClients(run), run.start(torch.zeros(4, dtype=torch.float64))
    moved = np.zeros(4)
    cohorts = resolve(sampling, CLIENTS).cohorts(100)
    assert cohorts is not None
    for members, share in cohorts:
        after = clients.run_round(start, cohort=run.cohort(0, members))
        moved -= share * after.x.numpy()
    return moved / float(moved.sum())


@pytest.mark.parametrize("text", ["sgd:momentum=0.9", "sgd:momentum=0.5,nesterov=true", "custom"])
@pytest.mark.parametrize("method", ["fedavg-rr", "fedshuffle", "fednova", "fedshuffle-gen"])
def test_the_audit_of_momentum_is_exact(method: str, text: str) -> None:
    optimiser = LocalOptimiser(Twice) if text == "custom" else LocalOptimiser.read(text)
    work = LocalWork(epochs=2, batch_size=2, optimiser=optimiser, interruption=MissLast())
    result = audit(CLIENTS, method, "uniform:2", work)
    assert result.exact
    np.testing.assert_allclose(
        result.effective_weights, mean_moves(method, "uniform:2", work), rtol=1e-6
    )
    assert result.consistent is (method == "fedshuffle-gen")


def test_fedshuffle_and_fednova_count_the_length_of_momentum() -> None:
    work = LocalWork(batch_size=2, optimiser="sgd:momentum=0.9")
    assert audit(CLIENTS, "fedshuffle", "uniform:2", work).consistent
    assert audit(CLIENTS, "fednova", "full", work).consistent
    assert audit(CLIENTS, "scaffold", "uniform:2", work).consistent
    far = LocalOptimiser.read("sgd:momentum=0.9").lengths(np.array([1, 1, 2, 3]))
    biased = audit(CLIENTS, "fedavg-rr", "full", work)
    wanted = CLIENTS.weights * far
    np.testing.assert_allclose(biased.effective_weights, wanted / wanted.sum(), rtol=1e-12)
    assert biased.findings[0].what == "Clients take from 1 to 3 local steps at one step size."


def test_common_steps_are_audited_by_their_length() -> None:
    work = LocalWork(batch_size=2, optimiser="sgd:momentum=0.9")
    fewest = audit(CLIENTS, "fedavg-min", "uniform:2", work)
    assert fewest.how == "quadrature"
    np.testing.assert_allclose(
        fewest.effective_weights, mean_moves("fedavg-min", "uniform:2", work), rtol=1e-6
    )


def test_unequal_adaptive_steps_minimise_no_weighted_objective() -> None:
    for method in ("fedshuffle", "fedavg-rr", "mime"):
        result = audit(CLIENTS, method, work=LocalWork(optimiser="adamw"))
        assert (result.consistent, result.exact, result.adaptive) == (False, False, "unequal")
        told = "unequal numbers of adaptive steps minimise no weighted objective."
        assert result.conclusion == ("not consistent", told)
        finding = result.findings[-1]
        assert finding.what.startswith("Clients take from 1 to 5 steps of adamw")
        assert "LocalWork(steps=K)" in finding.fix
    stopped = LocalWork(steps=3, optimiser="adamw", interruption=MissLast())
    assert audit(CLIENTS, "fedshuffle", work=stopped).consistent is False


def test_equal_adaptive_steps_are_undecided() -> None:
    work = LocalWork(steps=5, optimiser="adamw")
    result = audit(CLIENTS, "fedshuffle", "uniform:2", work)
    assert (result.consistent, result.exact, result.adaptive) == (None, False, "equal")
    assert result.conclusion[0] == "undecided"
    assert "fedadam+fedshuffle" in result.findings[-1].fix
    assert "gradients twice as long move a client 1 times as far, not twice" in result.facts()
    assert json.loads(json.dumps(result.to_dict()))["optimiser"] == "adamw"
    biased = audit(CLIENTS, "fedavg-rr", "uniform:2", work)
    assert biased.consistent is False
    assert "of the objective is in the wrong place" in biased.conclusion[1]


@pytest.mark.parametrize("method", ["fedavg-min", "fedavg-mean"])
def test_a_cohort_that_agrees_on_its_steps_takes_equal_ones(method: str) -> None:
    result = audit(CLIENTS, method, work=LocalWork(optimiser="adamw"))
    assert (result.consistent, result.adaptive) == (None, "equal")
    np.testing.assert_allclose(result.effective_weights, CLIENTS.weights, rtol=1e-12)
    sampled = audit(CLIENTS, method, "uniform:2", LocalWork(optimiser="adamw"))
    assert (sampled.consistent, sampled.adaptive) == (False, "equal")  # by its weights


def test_one_client_or_a_shared_scale_is_no_matter() -> None:
    assert audit(CLIENTS, "pooled-rr", work=LocalWork(optimiser="adamw")).adaptive == ""
    alone = Federation.from_sizes([5])
    assert audit(alone, "fedshuffle", work=LocalWork(optimiser="adamw")).consistent
    assert audit(CLIENTS, "mime-adam", work=LocalWork(steps=5)).consistent


def test_adaptive_clients_settle_at_a_median_as_the_finding_says() -> None:
    """Parabolas with optima 1, -2, 5 and 0.5: their weighted mean is 1.6, the median 0.5 to 1."""
    optima = np.array([[1.0], [-2.0], [5.0], [0.5]])
    settled = {}
    for text in ("sgd", "adam"):
        work = LocalWork(steps=3, optimiser=text)
        run = Run(CLIENTS, "fedshuffle", "full", work, step_size=0.01)
        clients = QuadraticClients(run, np.ones(4), optima)
        state = run.start(torch.zeros(1, dtype=torch.float64))
        for _ in range(400):
            state = clients.run_round(state)
        settled[text] = float(state.x)
    assert settled["sgd"] == pytest.approx(1.6, abs=1e-3)
    assert 0.45 < settled["adam"] < 1.05


def test_the_black_box_audit_agrees_with_the_audit() -> None:
    def fedavg(clients: Any, sizes: Any, updates: Any) -> Any:
        return sizes / sizes.sum() @ updates

    by_size = Federation.from_sizes([1, 2, 4, 5])
    for text in ("sgd:momentum=0.9", "adamw"):
        work = LocalWork(batch_size=2, optimiser=text)
        found = audit_server(fedavg, by_size, "uniform:2", work)
        known = audit(by_size, "fedavg-rr", "uniform:2", work)
        np.testing.assert_allclose(found.effective_weights, known.effective_weights, rtol=1e-9)
        assert found.conclusion == known.conclusion
        assert (found.optimiser, found.adaptive) == (text, known.adaptive)
        scaled = audit_server(fedavg, by_size, "full", work, step_sizes="scaled")
        assert scaled.consistent is (text != "adamw")
    equal = audit_server(fedavg, by_size, "full", LocalWork(steps=5, optimiser="adamw"))
    assert (equal.consistent, equal.exact) == (None, False)
    assert equal.findings[-1].what == "adamw rescales each client's gradients by their own size."


# Everywhere else ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["scaffold", "fedshuffle"])
def test_methods_that_read_gradients_off_updates_refuse_adaptive_ones(method: str) -> None:
    chosen = methods.get(method)
    if method == "fedshuffle":
        chosen = chosen.with_momentum(methods.GlobalMomentum())
    with pytest.raises(FedShuffleError, match="reads gradients off the clients' updates, and adam"):
        Run(CLIENTS, chosen, work=LocalWork(optimiser="adam"))
    Run(CLIENTS, chosen, work=LocalWork(optimiser="sgd:momentum=0.9"))


def test_control_variates_and_global_momentum_are_gradients_also_with_momentum() -> None:
    """Linear clients: what is read off their updates is their gradient, the unit vectors."""
    work = LocalWork(epochs=2, optimiser="sgd:momentum=0.9")
    run = Run(CLIENTS, "scaffold", work=work)
    clients, state = QuadraticClients(run), run.start(torch.zeros(4, dtype=torch.float64))
    state = clients.run_round(state)
    assert state.clients is not None
    torch.testing.assert_close(state.clients.rows(np.arange(4)), torch.eye(4).double())
    momentum = methods.get("fedshuffle").with_momentum(methods.GlobalMomentum(1.0))
    run = Run(CLIENTS, momentum, work=work)
    state = QuadraticClients(run).run_round(run.start(torch.zeros(4, dtype=torch.float64)))
    torch.testing.assert_close(state.method_state["momentum"], torch.tensor(CLIENTS.weights))


def test_theory_is_for_plain_sgd() -> None:
    with pytest.raises(FedShuffleError, match="for local steps of plain SGD, not for the local"):
        method_constants(CLIENTS, "fedshuffle", work=LocalWork(optimiser="sgd:momentum=0.9"))


def test_configs_read_and_write_it(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    text = 'rounds = 1\nmodel = "a:b"\nloss = "cross_entropy"\ndata = "a:c"\n[work]\n'
    file.write_text(f'{text}optimiser = "adamw:beta1=0.8"\n')
    config = loader.load(file)
    assert config.work.optimiser == LocalOptimiser("adamw", {"beta1": 0.8})
    assert writer.plain(config)["work"]["optimiser"] == "adamw:beta1=0.8"
    assert loader.load(file, {"work.optimiser": "sgd"}).work.optimiser == LocalOptimiser("sgd")
    with pytest.raises(FedShuffleError, match=r"work.optimiser: unknown local optimiser 'adan'"):
        loader.load(file, {"work.optimiser": "adan"})
    with pytest.raises(FedShuffleError, match=r"work.optimiser: .*Twice has no name in a config"):
        writer.plain(LocalWork(optimiser=Twice))


def test_the_fingerprint_of_a_run_has_it() -> None:
    given: list[LocalWork] = [LocalWork(optimiser=text).resolved() for text in TEXTS]
    found = [fingerprint.work(work) for work in given]
    assert len(set(found)) == len(found)
    assert "optimiser" not in found[0]  # runs of earlier versions can be resumed
    assert "kind='adamw', options={'weight_decay': 0.1, 'beta1': 0.95}" in found[2]


def test_a_run_is_not_resumed_with_another(tmp_path: Path) -> None:
    data = Federation.from_arrays(torch.ones(4, 1), torch.ones(4, 1), sizes=[1, 3])

    def go(optimiser: str, **more: Any) -> Any:
        work = LocalWork(steps=2, optimiser=optimiser)
        given: dict[str, Any] = {"loss": losses.squared_error, "rounds": 1, "work": work, **more}
        return train(torch.nn.Linear(1, 1), data, out=tmp_path, **given)

    go("adamw")
    assert go("adamw", rounds=2, resume=True).history[-1]["round"] == 2
    for other in ("adamw:beta1=0.8", "sgd"):
        with pytest.raises(FedShuffleError, match="work"):
            go(other, rounds=3, resume=True)


def test_the_command_line_audits_it() -> None:
    words = ["audit", "--sizes", "1,2,3", "--method", "fedshuffle", "--optimiser", "adamw"]
    result = CliRunner().invoke(app, [*words, "--json", "--check"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["optimiser"], found["adaptive"], found["consistent"]) == (
        "adamw",
        "unequal",
        False,
    )
    momentum = CliRunner().invoke(app, [*words[:-1], "sgd:momentum=0.9", "--check"])
    assert momentum.exit_code == 0
    assert "consistent: it minimises the objective you meant." in momentum.stdout
    diloco = ["audit", "--sizes", "1,2,3", "--method", "diloco", "--json"]
    assert "LocalWork(steps=...)" in str(CliRunner().invoke(app, diloco).exception)
    equal = CliRunner().invoke(app, [*diloco, "--steps", "5"])
    assert json.loads(equal.stdout)["consistent"] is None
    both = CliRunner().invoke(app, [*diloco, "--steps", "5", "--epochs", "2"])
    assert "--epochs changes nothing under --steps 5" in str(both.exception)


def test_cohorts_count_steps_by_length() -> None:
    workload = LocalWork(epochs=2, optimiser="sgd:momentum=0.5").on(CLIENTS.sizes)
    steps = workload.plan(np.arange(4), 0, 0)
    cohort = Cohort.of(CLIENTS, resolve("full", CLIENTS), workload, np.arange(4), steps)
    scale = methods.get("fedshuffle").averaging.step_scale(cohort)
    np.testing.assert_allclose(scale * cohort.planned_length, cohort.max_length, rtol=1e-12)
    assert all(a < b for a, b in pairwise(cohort.done_length))
