"""What checks are made of: comparisons, four clients with quadratic objectives or with examples for
real engines, and the mean of a method's rounds over all cohorts.
"""

import copy
import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.simulation import QuadraticClients, simulated_weights
from fedshuffle.auditing.subject import Subject
from fedshuffle.engines import Engine, Loss, Problem, SequentialEngine
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.methods.servers import Average
from fedshuffle.randomness import Purpose, generator
from fedshuffle.sampling import Cohorts, Full, Sampling, resolve
from fedshuffle.sampling.base import MAX_COHORTS
from fedshuffle.state import State
from fedshuffle.training import Result, train
from fedshuffle.training.client_state import ClientState, ClientStateStore
from fedshuffle.training.rounds import Run, simulate

SIZES, WEIGHTS = (1, 2, 4, 5), (0.1, 0.3, 0.4, 0.2)
"""Four clients on which every cause of a bias shows: batches of two make (1, 1, 2, 3) steps."""
WORK = LocalWork(batch_size=2)
OPTIMA = np.array([[1.0], [-2.0], [5.0], [0.5]])
DRAWS = 1024  # rounds to simulate where nothing exact is possible


class ConformanceError(FedShuffleError):
    """A promise is broken: the message says what was expected and what was found."""


class DoesNotApplyError(FedShuffleError):
    """A check does not apply to a method; the message is the reason."""


def ensure(condition: bool | np.bool_, message: str) -> None:
    """Fail the check unless the condition holds."""
    if not condition:
        raise ConformanceError(message)


def equal(found: ArrayLike, expected: ArrayLike, tolerance: float | FloatArray, what: str) -> None:
    """Fail if numbers differ by more than the tolerance; NaN differs from everything."""
    a, b = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    same = a.shape == b.shape and bool((np.abs(a - b) <= tolerance).all())
    ensure(same, f"{what}: expected {short(b)}, found {short(a)}.")


def short(values: ArrayLike) -> str:
    """Numbers as a short text.

    >>> short([0.1, 1 / 3])
    '[0.1, 0.333333]'
    """
    array = np.asarray(values, dtype=np.float64)
    few = [f"{value:.6g}" for value in array.ravel()[:8]]
    text = f"{', '.join(few)}{', ...' if array.size > 8 else ''}"
    return f"[{text}]" if array.ndim else text


def sizes(method: Method) -> tuple[int, ...]:
    """Examples per client, such that the method is defined."""
    return (3, 3, 3, 3) if method.balanced_only else SIZES


def federation(method: Method, *fields: Any) -> Federation:
    """The four clients, with these examples if any."""
    if fields:
        return Federation.from_arrays(*fields, sizes=sizes(method), weights=WEIGHTS)
    return Federation.from_sizes(sizes(method), WEIGHTS)


def partial_sampling(method: Method) -> str:
    """Partial participation, if the method is defined for it."""
    return "full" if method.balanced_only or method.pooled else "uniform:2"


def make_run(method: Method, sampling: str | Sampling, clients: Federation, **given: Any) -> Run:
    """A run of the method, without the local work that the method fixes; the check does not apply
    if the method is not defined.
    """
    if "work" in given:
        given["work"] = method.drop_fixed(given["work"])
    with error_context(lambda reason: DoesNotApplyError(str(reason)), FedShuffleError):
        return Run(clients, method, sampling, **given)


def needs_linear_steps(run: Run) -> None:
    """The check does not apply to clients whose optimiser rescales gradients, or decays weights."""
    if not (optimiser := run.workload.optimiser).linear:
        raise DoesNotApplyError(f"the local optimiser is {optimiser}, which is not linear.")


def without_server_optimiser(method: Method) -> Method:
    """The method with a server that only adds the update."""
    return dataclasses.replace(method, server=Average())


def quadratic_clients(
    run: Run, h: FloatArray, t: FloatArray, scaled: bool = True
) -> QuadraticClients:
    """Clients with these curvatures and, at zero, minus these gradients; pooled if the run is."""
    if run.method.pooled:  # one client with the mean objective over all examples
        share = np.array(SIZES) / sum(SIZES)
        h, t = (share @ h)[None], (share @ t)[None]
    return QuadraticClients(run, h, t, scaled)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, always the same."""
    return torch.from_numpy(np.asarray(generator(seed, Purpose.START).normal(size=shape)))


class Point(nn.Module):
    """A model that is just a vector."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(start.clone())


def half_squared_distance(model: Point, targets: Tensor) -> Tensor:
    """Mean of 1/2 |x - target|^2."""
    return 0.5 * (model.x - targets).square().sum(1).mean()


def point_problem(clients: Federation, start: Tensor) -> Problem:
    """Half the squared distance of a point to its examples."""
    return Problem(Point(start), half_squared_distance, clients)


def regression(method: Method, loss: Loss = losses.squared_error) -> tuple[Problem, Federation]:
    """A linear model of 3 parameters on noisy examples; the federation before any pooling."""
    examples = sum(sizes(method))
    clients = federation(method, numbers(examples, 2), numbers(examples, 1, seed=1))
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=2 + k))
    return Problem(model, loss, method.clients(clients)), clients


def states(problem: Problem, run: Run, rounds: int, engine: Engine | None = None) -> list[State]:
    """The states after each round."""
    engine = SequentialEngine(problem) if engine is None else engine
    return [state for (state,) in simulate(engine, [run], rounds)]


def tensors(state: State) -> dict[str, Tensor]:
    """All tensors of a state: its fields, with the names of tensors in mappings."""
    found = {"x": state.x}
    for owner in ("method_state", "optimiser_state"):
        parts = getattr(state, owner)
        found |= {f"{owner} {name}": parts[name] for name in sorted(parts)}
    if state.clients is not None:
        found["clients"] = state.clients.rows(np.arange(len(state.clients)))
    return found


def trained(method: Method, rounds: int, work: LocalWork, **more: Any) -> Result:
    """The result of training the linear model, with partial participation where possible."""
    problem, clients = regression(method)
    make_run(method, partial_sampling(method), clients, work=work)
    return train(
        problem.replica(),
        clients,
        loss=losses.squared_error,
        rounds=rounds,
        method=copy.deepcopy(method),  # a new process has none of the old one's objects
        sampling=partial_sampling(method),
        work=method.drop_fixed(work),
        step_size=0.05,
        **more,
    )


def listed_cohorts(sampling: Sampling) -> Cohorts:
    """All cohorts; the check does not apply if there are too many."""
    cohorts = sampling.cohorts(MAX_COHORTS)
    if cohorts is None:
        raise DoesNotApplyError(f"{sampling!r} has too many cohorts to enumerate.")
    return cohorts


class _NotAffineError(Exception):
    """A round is not an affine map of the state."""


class MeanMap:
    """The mean over all cohorts of the map from (model, server state, client state) to the next,
    read off the rounds of a run.

    With quadratic clients a round is an affine map of the whole state, ``s <- A_S s + b_S``, for
    nearly every method. Cohorts do not depend on the past, so the expectation follows the mean of
    these maps exactly: nothing needs to be drawn.

    Of a two-phase sampling its pool counts, as who is asked depends on the updates, so that a round
    would not be affine.
    """

    def __init__(self, clients: QuadraticClients) -> None:
        assert clients.t is not None
        self.clients = copy.copy(clients)
        self.clients.run = run = copy.copy(clients.run)
        run.sampling = run.sampling.pool
        cohorts = listed_cohorts(run.sampling)
        drawn = [(members, share) for members, share in cohorts if len(members)]
        self.d = clients.t.shape[1]
        self.store = ClientStateStore(self.d, torch.float64)
        fresh = run.start(torch.zeros(self.d, dtype=torch.float64))
        firsts = [self._round(members, fresh) for members, _ in drawn]
        self.shapes = {name: tensor.shape for name, tensor in tensors(firsts[0]).items()}
        flat = [self._flat(first) for first in firsts]
        # The mean after the first round with a nonempty cohort.
        self.start: FloatArray = np.average(flat, axis=0, weights=[share for _, share in drawn])
        width = len(self.start)
        empty = sum(share for members, share in cohorts if not len(members))
        self.matrix, self.constant = empty * np.eye(width), np.zeros(width)
        test = generator(0, Purpose.MONTE_CARLO).random(width)
        for members, share in drawn:
            origin = self._after(members, np.zeros(width))
            columns = [self._after(members, unit) - origin for unit in np.eye(width)]
            matrix, slack = np.stack(columns, axis=1), 1e-9 * np.abs(origin).max()
            found = self._after(members, test)
            if not np.allclose(found, matrix @ test + origin, rtol=1e-9, atol=slack):
                raise _NotAffineError
            self.matrix += share * matrix
            self.constant += share * origin

    def drift(self) -> FloatArray:
        """How far the model moves per round once the state has settled."""
        s = self.start
        for _ in range(3000):
            s = self.matrix @ s + self.constant
        return (self.matrix @ s + self.constant - s)[: self.d]

    def fixed_point(self) -> FloatArray:
        """The model at the fixed point that is reached from the start.

        Some methods preserve a sum (SCAFFOLD: c - sum w_i c_i). So the fixed point must differ from
        the start by something in the range of I - A.
        """
        still = np.eye(len(self.matrix)) - self.matrix
        z = np.linalg.lstsq(still @ still, self.constant - still @ self.start, rcond=None)[0]
        s = self.start + still @ z
        fixed = np.allclose(self.matrix @ s + self.constant, s, rtol=1e-6, atol=1e-8)
        ensure(fixed, "the mean of the method over all cohorts has no fixed point.")
        return s[: self.d]

    def _after(self, members: IntArray, s: FloatArray) -> FloatArray:
        """The flat state after a round of these clients from a flat state."""
        return self._flat(self._round(members, self._state(s)))

    def _round(self, members: IntArray, state: State) -> State:
        return self.clients.run_round(state, cohort=self.clients.run.cohort(state.round, members))

    def _flat(self, state: State) -> FloatArray:
        parts = tensors(state)
        floats = all(tensor.dtype == torch.float64 for tensor in parts.values())
        if not floats or self.shapes != {name: tensor.shape for name, tensor in parts.items()}:
            raise _NotAffineError
        return torch.cat([tensor.reshape(-1) for tensor in parts.values()]).numpy()

    def _state(self, s: FloatArray) -> State:
        pieces = torch.split(torch.tensor(s), [shape.numel() for shape in self.shapes.values()])
        shapes = self.shapes.items()
        parts = {name: x.reshape(shape) for (name, shape), x in zip(shapes, pieces, strict=True)}
        x, rows, clients = parts.pop("x"), parts.pop("clients", None), None
        if rows is not None:
            everyone = np.arange(len(rows))
            clients = ClientState.empty(len(rows), self.store).updated(everyone, rows)
        kept: dict[str, dict[str, Tensor]] = {"method_state": {}, "optimiser_state": {}}
        for name, tensor in parts.items():
            owner, _, key = name.partition(" ")
            kept[owner][key] = tensor
        return State(x, kept["method_state"], kept["optimiser_state"], 1, clients)


def measured_weights(run: Run) -> tuple[FloatArray, FloatArray]:
    """The weights of the expected update, by running the method; and their standard errors."""
    try:
        clients = quadratic_clients(run, np.zeros(4), -np.eye(4), scaled=False)
        drift = -MeanMap(clients).drift()
        return drift / drift.sum(), np.zeros(4)
    except _NotAffineError:
        subject = Subject(run.federation, run.method, run.sampling.pool, run.workload)
        raw, errors = simulated_weights(subject, seed=run.seed, rounds=DRAWS)
        return raw / raw.sum(), errors


def limit_point(
    method: Method, sampling: str | Sampling, h: FloatArray, clients: Federation, work: LocalWork
) -> FloatArray:
    """The point where the method settles in the limit of small steps, on quadratics of curvature h
    with their optima at ``OPTIMA``; once, or in several coordinates that must agree.
    """

    def at(step_size: float, optima: FloatArray) -> QuadraticClients:
        run = make_run(method, sampling, clients, work=work, step_size=step_size)
        return quadratic_clients(run, h, h[:, None] * optima, scaled=False)

    try:
        coarse, fine = (MeanMap(at(step, OPTIMA)).fixed_point() for step in (2e-3, 1e-3))
    except _NotAffineError:
        if not isinstance(resolve(sampling, clients), Full):
            raise DoesNotApplyError(
                "a round is not an affine map of the method's state, so its fixed point is computed"
                " only at full participation."
            ) from None
        stretched = np.array([1.0, -1.0, 2.0])  # one coordinate would leave nothing to choose from
        coarse, fine = (
            _run_to_rest(at(step, OPTIMA * stretched), step) / stretched for step in (0.02, 0.01)
        )
    return 2 * fine - coarse


def _run_to_rest(clients: QuadraticClients, step_size: float) -> FloatArray:
    """The mean of the model over the last of many rounds."""
    assert clients.t is not None
    state = clients.run.start(torch.zeros(clients.t.shape[1], dtype=torch.float64))
    rounds, last = round(20 / step_size), 100
    total = np.zeros(len(state.x))
    for k in range(rounds):
        state = clients.run_round(state)
        if k >= rounds - last:
            total += state.x.numpy() / last
    return total
