"""A method, a sampling and a rule of one's own: the examples, followed and held to theory."""

import itertools
import runpy
import shutil
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from fedshuffle import (
    Federation,
    FedShuffleError,
    LocalWork,
    Sampling,
    audit,
    losses,
    methods,
    train,
)
from fedshuffle import testing as conformance
from fedshuffle.auditing.simulation import simulated_weights
from fedshuffle.cli import app
from fedshuffle.config import imports
from fedshuffle.engines import ReferenceEngine
from fedshuffle.methods import (
    CohortMoments,
    Custom,
    Direction,
    FedShuffleGen,
    FullGradient,
    LocalPlan,
    Method,
    RoundContext,
    ServerOptimiser,
    StepCoefficients,
    Steps,
    own_steps,
)
from fedshuffle.sampling import Cohorts, Uniform
from fedshuffle.training.rounds import Run, simulate
from fedshuffle.transforms import ClientContext, Message, Transform
from tests import problems

ROOT = Path(__file__).parents[2]
OWN = ROOT / "examples" / "own"
PAGES = [ROOT / "docs" / "how-to" / f"add-a-{part}.md" for part in ("method", "sampling")]


@pytest.fixture
def own() -> Iterator[Callable[[str], Any]]:
    """What an import path names in the folder of the examples."""
    with imports.importable(OWN):
        yield lambda path: imports.find(path, OWN)


# The pages -----------------------------------------------------------------------------------


def test_the_examples_are_short() -> None:
    for name in ("feddyn.py", "windows.py", "steady.py"):
        assert len((OWN / name).read_text(encoding="utf-8").splitlines()) < 75, name


@pytest.mark.slow
def test_the_commands_of_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a copy of the folder, one after the other, each does what the pages say."""
    folder = tmp_path / "own"
    shutil.copytree(OWN, folder, ignore=shutil.ignore_patterns("__pycache__", "out", "comparison"))
    monkeypatch.chdir(folder)
    lines = [line for line in _pages().split("\n") if line.startswith("$ ")]
    said = {}
    for line in lines:
        program, *words = line[2:].split("#")[0].split()
        if program == "fedshuffle":
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, (line, done.output, done.exception)
            said[line] = done.output
        else:
            assert program == "python"
            with imports.importable(folder):
                runpy.run_path(words[0], run_name="__main__")
            said[line] = capsys.readouterr().out
    assert len(lines) == 7
    for line, text in said.items():
        if "train.py" in line:
            assert "feddyn: 0.0% of the objective in the wrong place" in text
        elif "check.py" in line:
            assert text.count("passes all checks") == 2
            assert "is what it says" in text
        elif "audit" in line:
            assert "exact" in text
    assert (folder / "out" / "model.safetensors").exists()
    assert "feddyn" in (folder / "comparison" / "report.html").read_text(encoding="utf-8")


def test_what_a_config_registers_is_undone_with_its_modules() -> None:
    before = methods.available()
    for _ in range(2):  # the second reads the modules again
        with imports.importable(OWN):
            method = imports.find("feddyn:METHOD", OWN)
            assert methods.get("feddyn") is method
            assert methods.get("feddyn:strength=0.25").direction.strength == 0.25  # type: ignore[attr-defined]
    assert methods.available() == before
    with pytest.raises(FedShuffleError, match="import path of a method"):
        methods.get("feddyn:METHOD")


# The method ----------------------------------------------------------------------------------


def _quadratics(sizes: Sequence[int]) -> tuple[ReferenceEngine, Tensor, Tensor]:
    """Clients f_i(x) = 1/2 sum_k a_ik (x_k - t_ik)^2, and their a and t."""
    n, d = len(sizes), 3
    rng = np.random.default_rng(5)
    curvature = torch.from_numpy(rng.uniform(0.5, 2.0, (n, d)))
    target = torch.from_numpy(rng.normal(size=(n, d)))
    repeats = torch.tensor(sizes)
    federation = Federation.from_arrays(
        torch.repeat_interleave(curvature, repeats, dim=0),
        torch.repeat_interleave(target, repeats, dim=0),
        sizes=list(sizes),
    )

    def loss(model: problems.Point, a: Tensor, t: Tensor) -> Tensor:
        return 0.5 * (a * (model.x - t).square()).sum(1).mean()

    from fedshuffle.engines import Problem

    problem = Problem(problems.Point(d), loss, federation)
    return ReferenceEngine(problem), curvature, target


@pytest.mark.parametrize("sampling", ["full", "uniform:2"])
def test_feddyn_is_its_papers_algorithm(own: Callable[[str], Any], sampling: str) -> None:
    """With local minima found exactly, and in the paper's own variables."""
    sizes, steps, eta, strength = [2, 2, 2, 2], 60, 0.05, 24.0
    engine, a, t = _quadratics(sizes)
    method = own("feddyn:METHOD").with_options({"strength": str(strength)})
    federation = engine.problem.federation
    run = Run(federation, method, sampling, LocalWork(steps=steps), eta, seed=3)
    alpha = strength / (eta * steps)

    theta, h = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    gradient = torch.zeros(4, 3, dtype=torch.float64)  # of each client where it was last
    for round, (state,) in enumerate(simulate(engine, [run], 6)):
        cohort = run.sampling.draw(3, round)
        # argmin of f_i(y) - <gradient_i, y> + alpha/2 |y - theta|^2
        y = (a * t + gradient + alpha * theta)[cohort] / (a + alpha)[cohort]
        gradient[cohort] = (a * (torch.zeros(4, 3) - t))[cohort] + a[cohort] * y
        h = h - alpha / 4 * (y - theta).sum(0)
        theta = y.mean(0) - h / alpha
        assert torch.allclose(state.x, y.mean(0), rtol=0, atol=1e-9)
        assert torch.allclose(state.method_state["h"], h, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "sampling"), [("feddyn", "full"), ("feddyn", "uniform:2"), ("feddyn+fedavg", "full")]
)
def test_feddyn_converges_linearly_to_the_optimum(
    own: Callable[[str], Any], name: str, sampling: str
) -> None:
    """Where clients differ in data, curvature and steps, and FedAvg stops elsewhere."""
    sizes = [1, 2, 4, 5]
    engine, a, t = _quadratics(sizes)
    own("feddyn:METHOD")
    w = torch.tensor(engine.problem.federation.weights)[:, None]
    optimum = (w * a * t).sum(0) / (w * a).sum(0)
    runs = [
        Run(engine.problem.federation, method, sampling, step_size=0.05)
        for method in (name, "fedavg-rr")
    ]
    gaps = [
        [float((state.x - optimum).norm()) for state in states]
        for states in simulate(engine, runs, 100)
    ]
    after = len(gaps) // 2
    assert 1e-14 < gaps[-1][0] < 1e-2 * gaps[after][0]  # still falling by the same factor
    assert gaps[-1][1] > 1e-2


@pytest.mark.parametrize("sampling", ["full", "uniform:2", "importance:2"])
def test_feddyns_formula_agrees_with_what_it_does(own: Callable[[str], Any], sampling: str) -> None:
    from fedshuffle.auditing.subject import Subject
    from fedshuffle.sampling import resolve

    federation = Federation.from_sizes([1, 2, 4, 5])
    method = own("feddyn:METHOD")
    result = audit(federation, method, sampling)
    assert result.consistent
    assert result.exact
    workload = LocalWork().on(federation.sizes)
    setting = Subject(federation, method, resolve(sampling, federation), workload)
    weights, errors = simulated_weights(setting, 0, 640)
    share = weights / weights.sum()
    assert (np.abs(share - federation.weights) <= 5 * errors + 1e-6).all()


def test_feddyn_refuses_a_strength_that_would_oscillate(own: Callable[[str], Any]) -> None:
    engine, _, _ = _quadratics([1, 2])
    own("feddyn:METHOD")
    run = Run(engine.problem.federation, "feddyn:strength=1.5")
    with pytest.raises(FedShuffleError, match="strength = "):
        next(simulate(engine, [run], 1))


# The sampling --------------------------------------------------------------------------------


def test_windows_by_enumeration(own: Callable[[str], Any]) -> None:
    window, b = [0, 1, 0, 1, 0, 2, 2], 2
    sampling = own("windows:Windows")(window, b)
    n = len(window)
    p, pairs, cohorts = np.zeros(n), np.zeros((n, n)), {}
    for k in range(3):
        members = [i for i in range(n) if window[i] == k]
        subsets = list(itertools.combinations(members, b))
        for subset in subsets:
            cohorts[subset] = 1 / (3 * len(subsets))
            p[list(subset)] += cohorts[subset]
            pairs[np.ix_(subset, subset)] += cohorts[subset]
    assert np.allclose(sampling.p, p)
    assert np.allclose(sampling.pair_probabilities(), pairs)
    assert {tuple(s.tolist()): q for s, q in sampling.cohorts(100)} == pytest.approx(cohorts)
    assert sampling.cohorts(3) is None
    v = np.arange(1.0, n + 1)
    sums = sum(q * np.isin(np.arange(n), s) * v[list(s)].sum() for s, q in cohorts.items())
    assert np.allclose(sampling.expected_sums(v), sums)
    excess = pairs - np.outer(p, p) - np.diag(p * sampling.s)
    assert np.linalg.eigvalsh(excess)[-1] < 1e-12
    drawn = [tuple(sampling.draw(1, round).tolist()) for round in range(3000)]
    assert set(drawn) == set(cohorts)
    for subset, q in cohorts.items():
        assert abs(drawn.count(subset) / 3000 - q) < 5 * np.sqrt(q / 3000)


def test_fedshuffle_is_consistent_with_windows(own: Callable[[str], Any]) -> None:
    federation = Federation.from_sizes([1, 2, 4, 6, 6, 6])
    sampling = own("windows:make")(federation)
    assert audit(federation, "fedshuffle", sampling).consistent
    assert audit(federation, "fedavg-rr", sampling).consistent is False
    assert audit(federation, "fedavg-rr", sampling).exact


# The rule ------------------------------------------------------------------------------------


def test_steadys_effective_weights_by_hand(own: Callable[[str], Any]) -> None:
    """Of sizes 1, 2, 4 two are drawn: i with j counts w_i / (w_i + w_j), its steps cancel."""
    result = audit(Federation.from_sizes([1, 2, 4]), own("steady:METHOD"), "uniform:2")
    pairs = [(0, 1), (0, 2), (1, 2)]
    w = [Fraction(1), Fraction(2), Fraction(4)]
    shares = [
        sum(w[i] / (w[a] + w[b]) for a, b in pairs if i in (a, b)) / len(pairs) for i in range(3)
    ]
    assert result.effective_weights == pytest.approx([float(share) for share in shares])
    assert result.exact
    (finding,) = result.findings  # the cohort's sum, and not the steps
    assert "normalised over the cohort" in finding.what
    for sampling in ("full", "one"):
        assert audit(Federation.from_sizes([1, 2, 4]), "steady", sampling).consistent


def test_steady_with_its_q_replaced_is_consistent(own: Callable[[str], Any]) -> None:
    half, repaired = own("steady:half_scaled"), own("steady:repaired")
    one = Custom(lambda weights, cohort: np.ones_like(weights))  # w-tilde holds 1/p already
    method = Method("always", "by inclusion probability", FedShuffleGen(half, repaired, one))
    assert audit(Federation.from_sizes([1, 2, 4]), method, "uniform:2").consistent


# All of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["feddyn", "steady"])
def test_the_methods_conform(own: Callable[[str], Any], name: str) -> None:
    method, windows = own(f"{name}:METHOD"), own("windows:Windows")
    report = conformance.check(method, ["full", "uniform:2", windows([0, 0, 1, 1], b=1)])
    assert report.passed, str(report)


def test_the_sampling_conforms(own: Callable[[str], Any]) -> None:
    report = conformance.check_sampling(own("windows:Windows")([0, 1, 0, 1, 0, 2, 2], b=2))
    assert report.passed, str(report)


# What goes wrong -----------------------------------------------------------------------------

PLAIN = methods.get("fedshuffle").averaging


class _Made(Direction):
    """A direction whose round is a function."""

    client_state = False

    def __init__(self, steps: Callable[[RoundContext], Any]) -> None:
        self.steps = steps

    def round(self, context: RoundContext) -> Steps:
        made: Steps = self.steps(context)
        return made


class _Keeping(_Made):
    client_state = True


class _Keep(Transform):
    """Clients keep their updates, or the wrong number of them."""

    keeps_state = True

    def __init__(self, rows: int = 1) -> None:
        self.rows = rows

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return Message(updates, updates.clone().expand(self.rows, -1))


def _planned(plan: Callable[[RoundContext], Any], state: Any = None) -> Any:
    def steps(context: RoundContext) -> Any:
        yield plan(context)
        return {} if state is None else state(context)

    return steps


def _silent(context: RoundContext) -> Any:
    return {}
    yield


def _twice(context: RoundContext) -> Any:
    yield LocalPlan(StepCoefficients())
    yield LocalPlan(StepCoefficients())
    return {}


def _go(context: RoundContext) -> LocalPlan:
    return LocalPlan(StepCoefficients())


def _one_round(method: Method) -> None:
    engine = ReferenceEngine(problems.unit_vectors([1, 2, 3]))
    next(simulate(engine, [Run(engine.problem.federation, method)], 1))


MISTAKES: list[tuple[Callable[[RoundContext], Any], str]] = [
    (lambda context: LocalPlan(StepCoefficients()), "generator"),
    (_silent, "ends without a LocalPlan"),
    (_twice, "yields again"),
    (_planned(lambda context: StepCoefficients()), "yields a StepCoefficients"),
    (_planned(lambda context: None), "None"),
    (_planned(lambda context: LocalPlan([StepCoefficients()])), "1 StepCoefficients for 3"),
    (_planned(lambda context: LocalPlan([0.1] * 3)), "a float"),  # type: ignore[list-item]
    (_planned(lambda context: LocalPlan(StepCoefficients(v=torch.zeros(2)))), r"v .*\(3,\)"),
    (_planned(lambda context: LocalPlan(StepCoefficients(v=np.zeros(3)))), "v .*ndarray"),  # type: ignore[arg-type]
    (_planned(lambda context: LocalPlan(StepCoefficients(v=context.x.float()))), "float64"),
    (_planned(lambda context: LocalPlan(StepCoefficients(scale=context.x[:1]))), "scale"),
    (_planned(lambda context: LocalPlan(StepCoefficients(), np.ones(2))), r"report.*\(2,\)"),
    (_planned(lambda context: LocalPlan(StepCoefficients(), np.eye(3))), r"report.*\(3, 3\)"),
    (
        _planned(lambda context: LocalPlan(StepCoefficients(), state_weights=np.ones(4))),
        r"state_weights.*\(4,\)",
    ),
    (_planned(_go, lambda context: {"h": 1.0}), "h is a float"),
    (_planned(_go, lambda context: [context.x]), "mapping"),
    (
        _planned(lambda context: LocalPlan(lambda k, own: StepCoefficients(v=own))),
        "client_state = True",
    ),
    (_planned(lambda context: LocalPlan(StepCoefficients(), keep=_Keep())), "client_state = True"),
    (_planned(lambda context: FullGradient((context.x,), np.arange(3), np.ones(3), 0)), "weights"),
    (
        _planned(lambda context: FullGradient((context.x[:2],), np.arange(3), np.eye(3), 0)),
        "point",
    ),
]


@pytest.mark.parametrize(("steps", "message"), MISTAKES)
def test_mistakes_in_a_direction_have_clear_errors(
    steps: Callable[[RoundContext], Any], message: str
) -> None:
    with pytest.raises(FedShuffleError, match=message):
        _one_round(Method("mistaken", "", PLAIN, direction=_Made(steps)))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (LocalPlan(StepCoefficients(), keep=_Keep(rows=2)), r"state of .*\(2, 3\)"),
        (LocalPlan(lambda k, own: 1.0, keep=_Keep()), "a float"),  # type: ignore[arg-type, return-value]
    ],
)
def test_mistakes_in_what_clients_keep(plan: LocalPlan, message: str) -> None:
    steps = _planned(lambda context: plan)
    with pytest.raises(FedShuffleError, match=message):
        _one_round(Method("mistaken", "", PLAIN, direction=_Keeping(steps)))


class _Server(ServerOptimiser):
    def __init__(self, step: Any) -> None:
        self.given = step

    def step(self, x: Tensor, update: Tensor, step_size: float, kept: Any) -> Any:
        return self.given


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (torch.zeros(3), "next model"),
        ((torch.zeros(2), {}), "next model"),
        ((torch.zeros(3, dtype=torch.float64), {"m": 1.0}), "a float"),
    ],
)
def test_mistakes_in_a_server_have_clear_errors(step: Any, message: str) -> None:
    with pytest.raises(FedShuffleError, match=f"_Server.step.*{message}"):
        _one_round(Method("mistaken", "", PLAIN, server=_Server(step)))


@pytest.mark.parametrize(
    ("weights", "message"), [(np.ones(2), r"shape \(2,\)"), (np.full(3, np.nan), "finite")]
)
def test_mistakes_in_effective_weights_have_clear_errors(weights: Any, message: str) -> None:
    class Weighting(_Made):
        def effective_weights(self, moments: CohortMoments) -> Any:
            return weights

    method = Method("mistaken", "", PLAIN, direction=Weighting(_planned(_go)))
    with pytest.raises(FedShuffleError, match=f"Weighting.effective_weights .*{message}"):
        audit(Federation.from_sizes([1, 2, 3]), method)


def test_mistakes_in_a_rule_have_clear_errors() -> None:
    one = FedShuffleGen(lambda clients: 1.0, own_steps, PLAIN.normaliser)  # type: ignore[arg-type, return-value]
    with pytest.raises(FedShuffleError, match=r"step normalisation c gives .* shape \(\)"):
        _one_round(Method("mistaken", "", one))
    q = Custom(lambda weights, cohort: np.ones((2, 1)))
    with pytest.raises((FedShuffleError, ValueError), match="shape"):
        _one_round(Method("mistaken", "", FedShuffleGen(own_steps, own_steps, q)))


def test_mistakes_in_a_method_have_clear_errors() -> None:
    with pytest.raises(FedShuffleError, match="direction of mistaken"):
        Method("mistaken", "", PLAIN, direction=_Made)  # type: ignore[arg-type]
    with pytest.raises(FedShuffleError, match="averaging of mistaken"):
        Method("mistaken", "", "fedavg")  # type: ignore[arg-type]
    with pytest.raises(FedShuffleError, match="step"):
        Method("mistaken", "", PLAIN, work={"step": 3})


def test_registering_twice() -> None:
    with methods.isolated_registry():
        first = methods.register(Method("mine", "", PLAIN))
        with pytest.raises(FedShuffleError, match=r"exists already.*replace=True"):
            methods.register(first)
        second = methods.register(Method("mine", "again", PLAIN), replace=True)
        assert methods.get("mine") is second
        with pytest.raises(
            FedShuffleError, match=r"'fedavg' exists already: choose another name\."
        ):
            methods.register(Method("fedavg", "", PLAIN), replace=True)
    with pytest.raises(FedShuffleError, match="unknown method 'mine'"):
        methods.get("mine")


class _Drawing(Sampling):
    """A sampling with whatever p and draw."""

    def __init__(self, p: Any, cohort: Any) -> None:
        self.p = p
        self.cohort = cohort

    def pair_probabilities(self) -> Any:
        return np.outer(self.p, self.p)

    def draw(self, seed: int, round: int) -> Any:
        return self.cohort


@pytest.mark.parametrize(
    ("p", "cohort", "message"),
    [
        ([0.5, 0.0, 1.0], [0], "the p of _Drawing: .*client 1 has 0"),
        ([0.5, 2.0, 1.0], [0], "the p of _Drawing: .*client 1 has 2"),
        ([0.5, 0.5], [0], "for 2 clients, but the federation has 3"),
        ([0.5, 0.5, 0.5], [0, 3], "_Drawing.draw gives .*from 0 to 2"),
        ([0.5, 0.5, 0.5], [1, 1], "different clients"),
        ([0.5, 0.5, 0.5], [2, 0], "in rising order"),
        ([0.5, 0.5, 0.5], [True, False, True], "numbers of different clients"),
    ],
)
def test_mistakes_in_a_sampling_have_clear_errors(
    p: list[float], cohort: list[int], message: str
) -> None:
    engine = ReferenceEngine(problems.unit_vectors([1, 2, 3]))
    sampling = _Drawing(np.array(p), np.array(cohort))
    with pytest.raises(FedShuffleError, match=message):
        next(simulate(engine, [Run(engine.problem.federation, "fedshuffle", sampling)], 1))


def test_defaults_of_a_sampling() -> None:
    """The defaults, held to those of a sampling that has formulas."""

    class Bare(Sampling):
        def __init__(self) -> None:
            self.p = Uniform(5, 2).p

        def pair_probabilities(self) -> Any:
            return Uniform(5, 2).pair_probabilities()

        def draw(self, seed: int, round: int) -> Any:
            return Uniform(5, 2).draw(seed, round)

    bare, known = Bare(), Uniform(5, 2)
    assert np.allclose(bare.s, known.s)
    assert np.allclose(bare.expected_sums(np.arange(5.0)), known.expected_sums(np.arange(5.0)))
    assert bare.cohorts(10) is None
    assert isinstance(known.cohorts(10), Cohorts)
    result = audit(Federation.from_sizes([1, 2, 3, 4, 5]), "fedavg-rr", bare, draws=3200)
    exact = audit(Federation.from_sizes([1, 2, 3, 4, 5]), "fedavg-rr", known)
    assert result.standard_errors is not None
    distance = np.abs(result.effective_weights - exact.effective_weights)
    assert (distance < 5 * result.standard_errors).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": "windows:mak"}, "sampling: .*Did you mean 'make'"),
        ({"sampling": "windows:generator"}, "sampling: 'windows:generator' "),
        ({"sampling": "builtins:len"}, "what 'builtins:len' returns must be of type Sampling"),
        ({"method": "windows:make"}, "method: 'windows:make' must be of type Method"),
    ],
)
def test_configs_name_objects_of_the_wrong_type(
    change: dict[str, str], message: str, tmp_path: Path
) -> None:
    from fedshuffle import config

    settings = {"out": str(tmp_path / "out"), **change}
    with pytest.raises(FedShuffleError, match=message):
        config.load(OWN / "config.toml").override(settings).run()


def _pages() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


# Without ceremony ---------------------------------------------------------------------------------


class Bare(Direction):
    """No dataclass and no repr of its own; its weights knows no formula."""

    def __init__(self, report: bool = False) -> None:
        self.report = report

    def round(self, context: RoundContext) -> Steps:
        report = np.ones(len(context.cohort.clients)) if self.report else None
        yield LocalPlan(StepCoefficients(), report)
        return context.state

    def effective_weights(self, moments: CohortMoments) -> None:
        return None


class BareServer(ServerOptimiser):
    def step(self, x: Any, update: Any, step_size: float, kept: Any) -> Any:
        return x + step_size * update, kept


def bare(report: bool = False) -> Method:
    rule = methods.get("fedavg-rr").averaging
    return Method("bare", "", rule, direction=Bare(report), server=BareServer())


def test_a_resumed_run_checks_parts_without_a_repr(tmp_path: Path) -> None:
    """As in another process, where the objects lie elsewhere."""
    points = torch.arange(6.0)[:, None]
    clients = Federation.from_arrays(torch.ones(6, 1), points, sizes=[1, 2, 3])
    common: dict[str, Any] = {"loss": losses.squared_error, "out": tmp_path / "run"}
    first = bare()  # kept, so that the second lies elsewhere
    train(torch.nn.Linear(1, 1), clients, method=first, rounds=2, **common)
    train(torch.nn.Linear(1, 1), clients, method=bare(), rounds=4, resume=True, **common)
    assert " at 0x" not in (tmp_path / "run" / "run.json").read_text()


def test_without_a_formula_the_audit_simulates() -> None:
    found = audit(Federation.from_sizes([1, 2, 3]), bare(), draws=64)
    assert "64 rounds" in found.how
    np.testing.assert_allclose(found.effective_weights, np.array([1, 4, 9]) / 14)


def test_a_report_is_refused_under_optimal_sampling() -> None:
    clients = Federation.from_sizes([1, 2, 3])
    method = bare(report=True).with_averaging(methods.get("fedshuffle"))
    run = Run(clients, method, "optimal:1")
    with pytest.raises(FedShuffleError, match="learns from what every client"):
        run.local_training(run.start(torch.zeros(2)))
