"""The audit against what training really does, over all cohorts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedshuffle import MVR, GlobalMomentum, LocalWork, Method, MissLast, audit, methods
from fedshuffle.engines import LoopEngine
from fedshuffle.kernel import Probe
from fedshuffle.methods import Plain
from fedshuffle.methods.servers import Average
from fedshuffle.rounds import Run
from fedshuffle.sampling import Independent, One, Sampling, Table, Uniform
from fedshuffle.state import State
from tests import brute
from tests.problems import copies, quadratic, targets, unit_vectors

Memory = dict[str, torch.Tensor]
Floats = NDArray[np.float64]
SIZES = [1, 2, 4, 5]
WEIGHTS = [0.1, 0.3, 0.4, 0.2]


class Forced(Table):  # type: ignore[misc]
    """A sampling that draws the cohort it is told to, with the probabilities of another."""

    def __init__(self, sampling: Sampling, cohort: tuple[int, ...]) -> None:
        self.p = sampling.p
        self.cohort = np.array(cohort, dtype=np.int64)

    def draw(self, seed: int, round: int) -> NDArray[np.int64]:
        return self.cohort


def one_round(
    engine: LoopEngine,
    method: Method,
    sampling: Sampling,
    cohort: tuple[int, ...],
    work: LocalWork,
    x: torch.Tensor,
    memory: Memory,
    step: float = 0.01,
) -> tuple[torch.Tensor, Memory]:
    """The model and memory after a round with this cohort, by the library's own code."""
    run = Run(engine.problem.federation, method, sampling, work, step)
    run.sampling = Forced(sampling, cohort)
    round_ = run.method.round(State(x, memory), run.cohort(0), run.workload, 0, step, 1.0)
    request = next(round_)
    while True:
        answer = (engine.probe if isinstance(request, Probe) else engine.walk)([request])  # type: ignore[list-item]
        try:
            request = round_.send(answer[0])
        except StopIteration as stop:
            return stop.value.x, stop.value.memory


NAMES = [  # those with a memory of their own are held against it in tests/test_conformance.py
    method.name
    for method in methods.available()
    if not (method.balanced_only or method.pooled)
    and isinstance(method.direction, Plain | MVR)
    and isinstance(method.server, Average)
    and "batch_size" not in method.work
]
SAMPLINGS: list[Sampling] = [
    Uniform(4, 2),
    Independent([0.5, 0.9, 0.2, 0.4]),
    One([0.1, 0.2, 0.3, 0.4]),
    Table(4, [((0, 1), 0.25), ((2, 3), 0.5), ((1, 2, 3), 0.25)]),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
@pytest.mark.parametrize(
    "work",
    [
        LocalWork(batch_size=2),
        LocalWork(batch_size=2, interruption=MissLast()),
        LocalWork(batch_size=2, steps="min"),
        LocalWork(epochs=3, steps="mean"),
    ],
    ids=["finished", "unfinished", "min", "mean"],
)
def test_expected_update_over_all_cohorts_is_what_the_audit_says(
    name: str, sampling: Sampling, work: LocalWork
) -> None:
    """Client i moves along axis i only, so the mean update is the objective, coordinate by
    coordinate. A method that claims consistency moves like full participation does.
    """
    problem = unit_vectors(SIZES, WEIGHTS)
    engine, method = LoopEngine(problem), methods.get(name).with_momentum(None)
    x = torch.zeros(4, dtype=torch.float64)
    mean = np.zeros(4)
    for cohort, probability in brute.cohorts(sampling):
        if cohort:
            after, _ = one_round(engine, method, sampling, cohort, work, x, {})
            mean += probability * after.numpy()
    result = audit(problem.federation, method, sampling, work)
    np.testing.assert_allclose(mean / mean.sum(), result.effective_weights, rtol=1e-9)
    if result.consistent:
        np.testing.assert_allclose(mean / mean.sum(), problem.federation.weights, rtol=1e-9)
        full = Uniform(4, 4)
        everyone, _ = one_round(engine, method, full, (0, 1, 2, 3), work, x, {})
        direction = everyone.numpy() / float(everyone.sum())
        np.testing.assert_allclose(mean / mean.sum(), direction, rtol=1e-9)


@pytest.mark.parametrize("momentum", [None, GlobalMomentum(0.3)], ids=["plain", "global"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
@pytest.mark.parametrize("name", ["fedshuffle", "fedshuffle-gen"])
def test_fedshuffles_expected_update_is_full_participations_at_any_step_size(
    name: str, sampling: Sampling, momentum: GlobalMomentum | None
) -> None:
    problem = quadratic(copies(SIZES, targets(4, 3), WEIGHTS))
    engine, method = LoopEngine(problem), methods.get(name).with_momentum(momentum)
    work = LocalWork(batch_size=2)
    x = targets(1, 3, seed=5)[0]
    memory = {"momentum": targets(1, 3, seed=6)[0]} if momentum else {}
    mean = torch.zeros(3, dtype=torch.float64)
    for cohort, probability in brute.cohorts(sampling):
        moved = 0.0 * x
        if cohort:
            moved = one_round(engine, method, sampling, cohort, work, x, memory, 0.3)[0] - x
        mean += probability * moved
    everyone = one_round(engine, method, Uniform(4, 4), (0, 1, 2, 3), work, x, memory, 0.3)[0] - x
    np.testing.assert_allclose(mean.numpy(), everyone.numpy(), rtol=1e-12)


def mean_fixed_point(
    engine: LoopEngine, method: Method, sampling: Sampling, work: LocalWork, step: float
) -> float:
    """Where the expected model comes to rest on a one-dimensional quadratic.

    A round is an affine map of (model, memory) that depends on the cohort, and cohorts are
    independent, so the expectation follows the mean of the maps. Each map is read off the library's
    own rounds at four states.
    """
    keys = {MVR: ("momentum", "previous"), GlobalMomentum: ("momentum",)}[type(method.direction)]
    size = 1 + len(keys)

    def after(cohort: tuple[int, ...], state: Floats) -> Floats:
        values = [torch.tensor([value], dtype=torch.float64) for value in state]
        memory = dict(zip(keys, values[1:], strict=True))
        x, memory_ = one_round(engine, method, sampling, cohort, work, values[0], memory, step)
        return np.array([float(x), *(float(memory_[key]) for key in keys)])

    matrix, constant = np.zeros((size, size)), np.zeros(size)
    for cohort, probability in brute.cohorts(sampling):
        if not cohort:
            matrix += probability * np.eye(size)
            continue
        origin = after(cohort, np.zeros(size))
        columns = [after(cohort, unit) - origin for unit in np.eye(size)]
        matrix += probability * np.stack(columns, axis=1)
        constant += probability * origin
    return float(np.linalg.solve(np.eye(size) - matrix, constant)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("momentum", [MVR(0.3), GlobalMomentum(0.2)], ids=["mvr", "global"])
@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=repr)
def test_momentum_rests_where_the_audit_says(
    name: str, momentum: MVR | GlobalMomentum, sampling: Sampling
) -> None:
    """In the limit of small steps (two sizes, extrapolated) the model rests at the optimum of the
    audit's effective objective, with the shift that exact MVR brings under sampling.
    """
    points = torch.tensor([[1.0], [-2.0], [5.0], [0.5]], dtype=torch.float64)
    engine = LoopEngine(quadratic(copies(SIZES, points, WEIGHTS)))
    method, work = methods.get(name).with_momentum(momentum), LocalWork(batch_size=2)
    coarse, fine = (mean_fixed_point(engine, method, sampling, work, step) for step in (2e-4, 1e-4))
    result = audit(engine.problem.federation, method, sampling, work)
    want = float(result.effective_weights @ points.numpy()[:, 0])
    assert 2 * fine - coarse == pytest.approx(want, abs=1e-5)
