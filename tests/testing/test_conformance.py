"""Every method and every sampling passes its checks, and planted bugs are caught."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

from fedshuffle import FedShuffleError, LocalWork, engines, methods
from fedshuffle import sampling as samplings
from fedshuffle import testing as conformance
from fedshuffle.cli import app
from fedshuffle.engines import Problem, ReferenceEngine
from fedshuffle.federation import Federation
from fedshuffle.kernel import Answer, FullGradient, StepCoefficients
from fedshuffle.methods import (
    CohortMoments,
    Custom,
    Direction,
    LocalPlan,
    Method,
    RoundContext,
)
from fedshuffle.methods.directions import MVR, GlobalMomentum, Steps
from fedshuffle.methods.fedavg import RULE as FEDAVG
from fedshuffle.methods.fedshuffle import RULE as FEDSHUFFLE
from fedshuffle.methods.servers import ServerOptimiser
from fedshuffle.sampling import Listed, Optimal, Sampling, Uniform
from fedshuffle.testing import ConformanceError, check, check_sampling
from fedshuffle.testing import problems as ideal
from fedshuffle.testing.problems import half_squared_distance
from fedshuffle.training.rounds import Run
from tests.kernel_requests import covering
from tests.problems import Point

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
ROOT = Path(__file__).parents[2]


NAMES = [method.name for method in methods.available()]
SENDERS = covering(NAMES)
"""Methods that between them send every request that any sends: engines are tested with these."""
SIMULATED = {"fedlin-sparse", "mime-adam", "mime-lite-adam"}
"""Methods whose rounds are no affine maps: their weights are simulated over many rounds."""


LINEAR = [name for name in NAMES if name != "diloco"]
"""Methods whose clients do not rescale their gradients: others rest nowhere in particular."""


def distinct() -> list[str]:
    """Methods that differ in more than the server, which ``expectation`` leaves out."""
    found: list[tuple[str, Method]] = []
    for name in NAMES:
        plain = dataclasses.replace(
            ideal.without_server_optimiser(methods.get(name)), name="", summary="", reference=""
        )
        if all(plain != other for _, other in found):
            found.append((name, plain))
    return [name for name, _ in found]


SOME = ("full", "uniform:2", "independent:0.5,0.9,0.2,0.4")
REST = tuple(one for one in conformance.SAMPLINGS if one not in SOME)


def cases() -> Iterator[Any]:
    """Every check with every method for which it can say something new.

    Those under a few samplings are fast; other samplings, fixed points and simulations are slow.
    """
    some = dict.fromkeys(("engines", "workers"), SENDERS)
    some |= {"rest": LINEAR, "descent": LINEAR, "expectation": distinct()}
    some |= {"fixed point": [name for name in distinct() if name in LINEAR]}
    for name, one in conformance.CHECKS.items():
        for method in some.get(name, NAMES):
            long = name == "fixed point" or (name == "expectation" and method in SIMULATED)
            slow = pytest.mark.slow if long else ()
            yield pytest.param(method, name, SOME, marks=slow, id=f"{method}-{name}")
            if one.every_sampling:
                rest = f"{method}-{name}-other samplings"
                yield pytest.param(method, name, REST, marks=pytest.mark.slow, id=rest)


@pytest.mark.parametrize(("method", "name", "given"), list(cases()))
def test_method(method: str, name: str, given: tuple[Any, ...]) -> None:
    report = check(method, given, checks=[name])
    # Some methods are defined for full participation only: then nothing else applies.
    assert report.passed if given is SOME else not report.failures, str(report)


@pytest.mark.parametrize("method", ["fedprox:mu=0.5+fedshuffle", "scaffold+fedavg-rr"])
def test_combined_methods(method: str) -> None:
    report = check(method, samplings=["uniform:2", "independent:0.5,0.9,0.2,0.4"])
    assert report.passed, str(report)


def test_no_sampling_is_left_out() -> None:
    named = {text.partition(":")[0] for text in conformance.SAMPLINGS if isinstance(text, str)}
    assert named == set(samplings._MAKERS)


CLIENTS = Federation.from_sizes([1, 2, 4, 5])
LARGE = Federation.from_sizes(range(1, 61))


@pytest.mark.parametrize(
    "given",
    [
        *(samplings.resolve(one, CLIENTS) for one in conformance.SAMPLINGS),
        *(
            samplings.parse(text, LARGE)
            for text in ("uniform:20", "importance:10", "one", "ais:5", "stratified:12:4")
        ),
    ],
    ids=repr,
)
def test_sampling(given: Sampling) -> None:
    report = check_sampling(given)
    assert report.passed, str(report)
    skipped = {one.check for one in report if one.outcome == "skipped"}
    assert skipped <= {"selection", "seeds", "inclusion", "pairs"}


def test_quadratic_clients_answer_as_the_reference_engine_does() -> None:
    """The clients of the checks follow the kernel."""
    optima = np.array([[1.0, -1.0], [-2.0, 2.0], [5.0, 0.0], [0.5, 3.0]])
    rows = np.repeat(optima, ideal.SIZES, axis=0)
    federation = Federation.from_arrays(rows, sizes=ideal.SIZES, weights=ideal.WEIGHTS)
    engine = ReferenceEngine(Problem(Point(2), half_squared_distance, federation))
    for name in ("fedprox:mu=0.3", "scaffold", "mime-adam", "fedshuffle-mvr", "fedlin-sparse"):
        run = Run(federation, name, "uniform:2", LocalWork(batch_size=2), 0.1, seed=2)
        clients = ideal.quadratic_clients(run, np.ones(4), optima)
        state = run.start(torch.zeros(2, dtype=torch.float64))
        for _ in range(3):
            seen: list[Any] = []
            after = clients.run_round(state, seen.append)
            for request in seen:
                answer = (
                    engine.full_gradients
                    if isinstance(request, FullGradient)
                    else engine.local_training
                )
                have, want = clients(request), answer([request])[0]
                torch.testing.assert_close(have.sums, want.sums)
                torch.testing.assert_close(have.states, want.states)
                torch.testing.assert_close(have.state_change, want.state_change)
            state = after


# Bugs, planted ---------------------------------------------------------------------------------


def method_of(direction: Direction, rule: Any = FEDAVG) -> Method:
    return Method("planted", "with a bug", rule, direction)


def failures(method: Method, name: str) -> dict[str, str]:
    """What a check says against a method, by sampling."""
    report = check(method, checks=[name])
    assert not report.passed
    return {one.check.partition(" under ")[2]: one.message for one in report.failures}


class StartsAtTheModel(Direction):
    """Control variates that begin as the model's weights instead of zero."""

    down = 2

    def round(self, context: RoundContext) -> Steps:
        c = context.state.get("c", context.x)
        yield LocalPlan(StepCoefficients(v=c))
        return {"c": 0.5 * c}


class AveragesModels(Direction):
    """The server takes ``sum a_i y_i`` for the model, with weights that need not sum to one."""

    def round(self, context: RoundContext) -> Steps:
        a = context.cohort.weight / context.cohort.probability
        walked = (a * context.step_sizes * context.cohort.done).sum()
        yield LocalPlan(StepCoefficients(v=-(a.sum() - 1) / walked * context.x))
        return {}


def test_moving_although_no_client_moves_is_caught() -> None:
    found = failures(method_of(StartsAtTheModel()), "rest")
    assert "no client moves" in found["full"]
    found = failures(method_of(AveragesModels(), FEDSHUFFLE), "rest")
    assert "full" not in found  # there the weights sum to one
    assert {"uniform:2", "one", "independent:0.5,0.9,0.2,0.4"} <= set(found)


def test_only_the_last_client_counting_is_caught() -> None:
    def last(weights: Floats, cohort: Any) -> Floats:
        return np.where(cohort.clients == cohort.clients[-1], weights, 1e300)

    rule = dataclasses.replace(FEDAVG, normaliser=Custom(last))
    method = Method("planted", "with a bug", rule)
    assert "the clients in the order" in failures(method, "order")[""]
    assert "the mean move" in failures(method, "descent")[""]


class TwiceAsFar(Direction):
    def round(self, context: RoundContext) -> Steps:
        yield LocalPlan(StepCoefficients(alpha=2.0))
        return {}


class AtAnotherPoint(Direction):
    """The gradient somewhere else: right as long as it is the same everywhere."""

    def round(self, context: RoundContext) -> Steps:
        cohort = context.cohort
        weights = cohort.weight[:, None] / cohort.weight.sum()
        ((g,),) = yield FullGradient((0.5 * context.x,), cohort.clients, weights, cohort.round)
        yield LocalPlan(StepCoefficients(alpha=0.0, v=g))
        return {}


class Uphill(ServerOptimiser):
    def step(
        self, x: torch.Tensor, update: torch.Tensor, step_size: float, kept: Any
    ) -> tuple[torch.Tensor, Any]:
        return x - step_size * update, kept


def test_anything_but_gradient_descent_is_caught() -> None:
    assert "the mean move" in failures(method_of(TwiceAsFar()), "descent")[""]
    assert "round 1" in failures(method_of(AtAnotherPoint()), "descent")[""]
    uphill = dataclasses.replace(methods.get("fedavg"), server=Uphill())
    assert "the server is given" in failures(uphill, "descent")[""]


@dataclass(frozen=True)
class StateInTheObject(Direction):
    """Momentum that no checkpoint sees."""

    hidden: dict[str, torch.Tensor] = field(default_factory=dict)
    down = 2

    def round(self, context: RoundContext) -> Steps:
        if context.cohort.round == 0:
            self.hidden.clear()
        m = self.hidden.get("m", torch.zeros_like(context.x))
        answer = yield LocalPlan(
            StepCoefficients(alpha=0.5, v=0.5 * m), report=-context.cohort.weight
        )
        self.hidden["m"] = answer.updates
        return {}


def test_state_outside_the_checkpoint_is_caught() -> None:
    method = method_of(StateInTheObject())
    assert "resumed in the middle" in failures(method, "resume")[""]


def test_an_engine_that_differs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    make = engines.make

    class Wrong:
        def __init__(self, right: Any) -> None:
            self.problem, self.right = right.problem, right
            self.full_gradients = right.full_gradients

        def local_training(self, requests: Any) -> list[Answer]:
            right = self.right.local_training(requests)
            return [dataclasses.replace(one, sums=one.sums * (1 + 1e-6)) for one in right]

    for bad, name in {"vectorized": "engines", "sequential:2:processes": "workers"}.items():

        def chosen(engine: str, problem: Problem, bad: str = bad) -> Any:
            found = make(engine, problem)
            return Wrong(found) if engine == bad else found

        monkeypatch.setattr(engines, "make", chosen)
        assert bad in failures(methods.get("fedavg"), name)[""]


@dataclass(frozen=True)
class WrongFormula(Direction):
    """The gradient, but it tells the audit that every client counts by its weight."""

    def round(self, context: RoundContext) -> Steps:
        yield LocalPlan(StepCoefficients())
        return {}

    def effective_weights(self, moments: CohortMoments) -> Floats:
        return moments.weights


@pytest.mark.parametrize("name", ["expectation", "fixed point"])
def test_a_wrong_formula_for_the_audit_is_caught(name: str) -> None:
    found = failures(method_of(WrongFormula()), name)
    assert {"full", "uniform:2"} <= set(found)  # steps are unequal even if all take part
    for message in found.values():
        assert "expected" in message
    right = check(method_of(WrongFormula(), FEDSHUFFLE), checks=[name])
    assert right.passed, str(right)  # there it is true


@dataclass(frozen=True)
class NoFormula(Direction):
    """The gradient; the audit has to simulate."""

    def round(self, context: RoundContext) -> Steps:
        yield LocalPlan(StepCoefficients())
        return {}


@final
@dataclass(frozen=True)
class Anchored(Direction):
    """All follow the first cohort's estimate of the gradient, which is never renewed.

    Its mean over all cohorts is the gradient, so the method is consistent.
    """

    def round(self, context: RoundContext) -> Steps:
        kept = context.state
        if not kept:
            cohort = context.cohort
            weights = (cohort.weight / cohort.probability)[:, None]
            ((first,),) = yield FullGradient((context.x,), cohort.clients, weights, cohort.round)
            kept = {"first": first}
        yield LocalPlan(StepCoefficients(alpha=0.0, v=kept["first"]))
        return kept

    def effective_weights(self, moments: CohortMoments) -> Floats:
        return moments.weights


@pytest.mark.parametrize(
    "sampling",
    [
        "independent:0.5,0.9,0.2,0.4",
        "importance:2",
        "one",
        Listed(4, [((0, 1), 0.25), ((2, 3), 0.5), ((1, 2, 3), 0.25)]),
    ],
    ids=str,
)
def test_cohorts_count_by_their_probability(sampling: str | Sampling) -> None:
    method = Method("anchored", "", FEDSHUFFLE, Anchored())
    report = check(method, [sampling], ["expectation"])
    assert report.passed, report


def test_a_method_without_a_formula_passes() -> None:
    report = check(method_of(NoFormula()), samplings=["uniform:2"])
    assert report.passed, str(report)


def stated(kind: type[Direction], **costs: float) -> Method:
    """A method of this direction with other costs than it has."""
    direction = kind()
    for name, cost in costs.items():
        object.__setattr__(direction, name, cost)
    return Method("planted", "with a bug", FEDSHUFFLE, direction)


@pytest.mark.parametrize(
    ("kind", "costs", "name", "message"),
    [
        (MVR, {"gradients_per_step": 1}, "gradients", "gradients computed in round"),
        (MVR, {"full_gradients": 1}, "gradients", "gradients computed in round"),
        (GlobalMomentum, {"down": 1}, "messages", "vectors to a client"),
        (MVR, {"up": 1}, "messages", "vectors from a client"),
        (MVR, {"trips": 1}, "messages", "trips"),
        (GlobalMomentum, {"trips": 2}, "messages", "trips"),
    ],
)
def test_a_wrong_cost_is_caught(
    kind: type[Direction], costs: dict[str, float], name: str, message: str
) -> None:
    assert message in failures(stated(kind, **costs), name)[""]
    assert check(stated(kind), checks=[name]).passed


def test_a_history_with_other_bytes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedshuffle.training.simulation import _traffic

    monkeypatch.setattr(
        "fedshuffle.training.simulation._traffic", lambda m: _traffic(m) | {"bytes_up": 1}
    )
    assert "bytes sent up" in failures(methods.get("fedavg"), "messages")[""]


class DrawsElsewhere(Direction):
    def round(self, context: RoundContext) -> Steps:
        yield LocalPlan(
            StepCoefficients(v=1e-3 * torch.rand(len(context.x), dtype=context.x.dtype))
        )
        return {}


class StaysPut(Direction):
    def round(self, context: RoundContext) -> Steps:
        yield LocalPlan(StepCoefficients(alpha=0.0))
        return {}


class ChangesTheStart(Direction):
    down = 2

    def round(self, context: RoundContext) -> Steps:
        m = context.state.get("m", torch.zeros_like(context.x))
        yield LocalPlan(StepCoefficients())
        return {"m": m.add_(context.x)}


@pytest.mark.parametrize(
    ("direction", "message"),
    [
        (DrawsElsewhere(), "another run with the same seed"),
        (StaysPut(), "another seed draws other clients"),
        (ChangesTheStart(), "must not change the state before it"),
    ],
)
def test_anything_but_a_function_of_the_seed_is_caught(direction: Direction, message: str) -> None:
    assert message in failures(method_of(direction), "purity")[""]


class Changed(Sampling):
    """Uniform sampling of 2 from 6 with one thing changed."""

    def __init__(self, **changes: Any) -> None:
        right = Uniform(6, 2)
        self.right, self.p = right, right.p
        self.__dict__.update(changes)

    @property
    def s(self) -> Floats:
        return np.asarray(self.__dict__.get("s_", self.right.s))

    def pair_probabilities(self) -> Floats:
        return np.asarray(self.__dict__.get("pairs_", self.right.pair_probabilities()))

    def expected_sums(self, v: Floats) -> Floats:
        return self.right.expected_sums(v) * float(self.__dict__.get("factor", 1.0))

    def draw(self, seed: int, round: int) -> Ints:
        drawn = self.__dict__.get("draw_", self.right.draw)(seed, round)
        return np.asarray(drawn)

    def cohorts(self, limit: int) -> Any:
        return self.__dict__.get("cohorts_", self.right.cohorts)(limit)


def independent_pairs() -> Floats:
    pairs = np.outer(Uniform(6, 2).p, Uniform(6, 2).p)
    np.fill_diagonal(pairs, Uniform(6, 2).p)
    return pairs


def half_the_cohorts(limit: int) -> Any:
    cohorts = Uniform(6, 2).cohorts(limit)
    assert cohorts is not None
    return dataclasses.replace(cohorts, probabilities=cohorts.probabilities / 2)


_COUNT = iter(range(10**9))


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, set()),
        ({"p": np.full(6, 0.5)}, {"inclusion", "frequencies"}),
        ({"p": np.zeros(6)}, {"probabilities"}),
        ({"cohorts_": half_the_cohorts}, {"probabilities"}),
        ({"pairs_": independent_pairs()}, {"pairs", "frequencies"}),
        ({"factor": 1.01}, {"expected sums"}),
        ({"s_": np.full(6, 0.5)}, {"variance vector"}),
        ({"s_": np.full(6, -0.5)}, {"variance vector"}),
        ({"draw_": lambda seed, round: Uniform(6, 2).draw(seed, round)[::-1]}, {"draws"}),
        ({"draw_": lambda seed, round: [1, 1]}, {"draws"}),
        ({"draw_": lambda seed, round: [1.0, 2.0]}, {"draws"}),
        ({"draw_": lambda seed, round: [2, 6]}, {"draws"}),
        ({"draw_": lambda seed, round: Uniform(6, 3).draw(seed, round)}, {"draws"}),
        ({"draw_": lambda seed, round: Uniform(6, 2).draw(next(_COUNT), 0)}, {"draws"}),
        ({"draw_": lambda seed, round: Uniform(6, 2).draw(seed, 0)}, {"seeds", "frequencies"}),
        ({"draw_": lambda seed, round: Uniform(6, 2).draw(0, round)}, {"seeds"}),
        ({"draw_": lambda seed, round: Uniform(5, 2).draw(seed, round)}, {"frequencies"}),
    ],
)
def test_a_wrong_sampling_is_caught(changes: dict[str, Any], failed: set[str]) -> None:
    found = {one.check for one in check_sampling(Changed(**changes)).failures}
    assert found >= failed
    assert bool(found) == bool(failed)


def test_a_wrong_selection_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    select = Optimal.select

    def eager(self: Optimal, *given: Any) -> Any:
        asked, p = select(self, *given)
        return asked, 0.5 * p

    monkeypatch.setattr(Optimal, "select", eager)
    found = {one.check for one in check_sampling(Optimal(Uniform(6, 4), 2)).failures}
    assert found == {"selection"}


# Reports, and the command ----------------------------------------------------------------------


def test_skipped_is_not_passed() -> None:
    report = check("fedrr", samplings=["uniform:2"], checks=["rest"])
    (only,) = report.results
    assert only.outcome == "skipped"
    assert "full participation" in only.message
    assert not report.failures
    assert not report.passed


def test_a_crash_is_a_failure() -> None:
    class Crashes(Direction):
        def round(self, context: RoundContext) -> Steps:
            raise KeyError("m")
            yield

    (only,) = check(method_of(Crashes()), checks=["order"]).results
    assert only.outcome == "failed"
    assert "KeyError" in only.message


def test_unknown_checks_are_refused() -> None:
    with pytest.raises(FedShuffleError, match="unknown check 'rst'"):
        check("fedavg", checks=["rst"])
    assert issubclass(ConformanceError, FedShuffleError)


OWN = """
from fedshuffle.kernel import StepCoefficients
from fedshuffle.methods import Direction, LocalPlan, Method
from fedshuffle.methods.fedavg import RULE

class Pushes(Direction):
    def round(self, context):
        yield LocalPlan(StepCoefficients(v=context.x))
        return {}

METHOD = Method("pushes", "a push along the model", RULE, Pushes())
"""


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    few = {name: conformance.CHECKS[name] for name in ("rest", "order")}
    monkeypatch.setattr("fedshuffle.testing.CHECKS", few)
    good = CliRunner().invoke(app, ["conformance", "fedavg"])
    assert good.exit_code == 0
    assert "11 passed, 0 failed, 2 do not apply" in " ".join(good.output.split())

    (tmp_path / "own_method.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    bad = CliRunner().invoke(app, ["conformance", "own_method:METHOD"])
    assert bad.exit_code == 1
    assert "no client moves" in " ".join(bad.output.split())
    as_json = CliRunner().invoke(app, ["conformance", "fedavg", "--json"])
    assert '"outcome": "skipped"' in as_json.output
    channel = CliRunner().invoke(app, ["conformance", "--transform", "topk:0.5+ef"])
    assert channel.exit_code == 0
    assert "5 passed, 0 failed, 1 do not apply" in " ".join(channel.output.split())
    with pytest.raises(FedShuffleError, match="either a method, or --transform"):
        CliRunner().invoke(app, ["conformance"], catch_exceptions=False)
    with pytest.raises(FedShuffleError, match="must be of type Transform"):
        CliRunner().invoke(
            app, ["conformance", "--transform", "own_method:METHOD"], catch_exceptions=False
        )
    with pytest.raises(FedShuffleError, match="must be of type Method"):
        CliRunner().invoke(app, ["conformance", "own_method:RULE"], catch_exceptions=False)
