r"""The theory's own claims, measured on problems whose constants are exact.

Every loss is a quadratic, :math:`f_{ij}(x) = \frac12 (x - m_{ij})^T Diag(a_{ij}) (x - m_{ij})`, so
that :func:`~fedshuffle.theory.quadratic_constants` knows L, mu, G, B, sigma, P, delta and the
optimum. Four panels, with step sizes that the theorems allow:

- ``noise``: the stationary error of FedShuffle by the step size, reshuffled and with replacement;
- ``cohort``: rounds to a given error by the cohort size, importance and uniform sampling;
- ``server``: the stationary error by the server step size, at one and the same effective step;
- ``similarity``: rounds to a small gradient by delta / L, of FedShuffleMVR and of MVR without
  local steps; here also with larger steps than the theorem's, each method at its best.

Three more have rounds for x, and over what is measured the upper bounds of the proofs, with their
constants, at step sizes for which the bound after the last round is smallest:

- ``distance``: that to the optimum, all clients taking part, with two server step sizes;
- ``sampling``: the same of a few clients a round, drawn by importance or uniformly;
- ``gradient``: the squared gradient in the mean so far, of FedShuffle and FedShuffleMVR.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn

from fedshuffle import losses, methods
from fedshuffle._arrays import FloatArray
from fedshuffle._terminal import Console
from fedshuffle.engines import LanesEngine, Problem
from fedshuffle.experiments import results_folder
from fedshuffle.experiments.quadratic import Claim
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import MVR
from fedshuffle.randomness import Purpose, generator
from fedshuffle.rounds import Run, play
from fedshuffle.theory import (
    ExactConstants,
    Regime,
    drift_noise,
    largest_step_size,
    method_constants,
    mvr_bound,
    mvr_setting,
    mvr_tune,
    quadratic_constants,
    tune,
    upper_bound,
)

# The problems --------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Quadratics:
    """Clients with quadratic losses, a row of curvatures and an optimum for each example."""

    sizes: tuple[int, ...]
    curvatures: FloatArray
    """One row for each example: a number for each direction, or one for all of them."""
    optima: FloatArray
    start: FloatArray

    @property
    def constants(self) -> ExactConstants:
        """What is exactly true of these losses."""
        d = self.optima.shape[1]
        hessians = self.curvatures[:, :, None] * np.eye(d)
        return quadratic_constants(hessians, self.optima, sizes=self.sizes)

    @property
    def hessian(self) -> FloatArray:
        """The diagonal of the objective's Hessian; every example counts the same."""
        each = np.broadcast_to(self.curvatures, self.optima.shape)
        return np.asarray(each.mean(axis=0))

    @property
    def problem(self) -> Problem:
        """The problem for an engine.

        Where curvatures are the same in all directions it is written as a linear regression on the
        number ``sqrt(a)``, whose gradients the engine knows by hand: several times as fast.
        """
        a, m = torch.from_numpy(self.curvatures), torch.from_numpy(self.optima)
        start = torch.from_numpy(self.start)
        if self.curvatures.shape[1] == 1:
            federation = Federation.from_arrays(a.sqrt(), a.sqrt() * m, sizes=self.sizes)
            line = nn.Linear(1, len(start), bias=False, dtype=torch.float64)
            line.weight = nn.Parameter(start[:, None].clone())
            return Problem(line, losses.squared_error, federation)
        return Problem(_Point(start), _quadratic, Federation.from_arrays(a, m, sizes=self.sizes))


class _Point(nn.Module):
    """A model that is nothing but a point."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(x.clone())

    def forward(self) -> Tensor:
        return self.x


def _quadratic(model: nn.Module, curvatures: Tensor, optima: Tensor) -> Tensor:
    values: Tensor = curvatures * (model() - optima).square()
    return values.sum() / (2 * len(optima))


def _normal(shape: tuple[int, ...], stream: int) -> FloatArray:
    return generator(0, Purpose.START, round=stream).normal(size=shape) / math.sqrt(shape[-1])


_DIMENSIONS = 16
"""Errors are sums over so many directions, which is cheaper than so many seeds."""


def alike() -> Quadratics:
    """Three clients with one optimum, the origin: G = 0, and all noise is that of the examples.

    Half of the examples are steep (curvature 1) and pull to one side, half are flat (1/2) and pull
    to the other. What is steep and what is to be seen there are correlated, as the worst case of
    the theorem has it; were all curvatures the same, reshuffling would leave even less, eta^3.
    """
    sizes = (2, 4, 6)
    side = np.tile([1.0, -1.0], 6)[:, None]
    curvatures = np.where(side > 0, 1.0, 0.5)
    optima = side / curvatures * _normal((1, _DIMENSIONS), 0) + _normal((12, _DIMENSIONS), 1)
    for mine in _clients(sizes):
        a = curvatures[mine]
        optima[mine] -= (a * optima[mine]).sum(axis=0) / a.sum()
    return Quadratics(sizes, curvatures, optima, start=np.zeros(_DIMENSIONS))


def apart() -> Quadratics:
    """Three clients that disagree, in their optima and in how steep they are: they drift."""
    sizes = (2, 4, 6)
    curvatures = np.array([1, 1, 1, 0.5, 1, 0.5, *[0.5] * 6])[:, None]
    optima = 0.5 * _normal((12, _DIMENSIONS), 2)
    for mine, own in zip(_clients(sizes), _normal((3, _DIMENSIONS), 3), strict=True):
        optima[mine] += own
    optima -= (curvatures * optima).sum(axis=0) / curvatures.sum()
    return Quadratics(sizes, curvatures, optima, start=np.zeros(_DIMENSIONS))


def many() -> Quadratics:
    """A hundred clients with 1 to 8 examples, the larger the fewer; all curvatures are 1."""
    sizes = tuple(int(size) for size in np.repeat([1, 2, 4, 8], [40, 30, 20, 10]))
    own = _normal((len(sizes), _DIMENSIONS), 4)
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    optima = np.repeat(own, sizes, axis=0) + 0.25 * _normal((sum(sizes), _DIMENSIONS), 5)
    optima -= optima.mean(axis=0)
    away = _normal((_DIMENSIONS,), 6)
    start = away / np.linalg.norm(away)
    return Quadratics(sizes, np.ones((sum(sizes), 1)), optima, start)


def similar(delta: float) -> Quadratics:
    """Three clients whose Hessians differ by delta, with curvatures from 1 down to 1/256.

    The steepest direction is the same for all, and makes L = 1: that is what holds MVR back if
    it may not walk. Elsewhere Hessians differ by delta, or nine tenths of what is there. Every
    direction has the same share of f at the start.
    """
    sizes, sign = (1, 1, 2), np.array([1.0, 1.0, -1.0])
    steepness = 2.0 ** -np.arange(9)
    apart = np.where(steepness < 1, np.minimum(delta, 0.9 * steepness), 0.0)
    clients = steepness + sign[:, None] * apart
    pulls = _normal((4, 9), 7)  # of the examples, at the optimum
    pulls = 0.1 * (pulls - pulls.mean(axis=0))
    curvatures = np.repeat(clients, sizes, axis=0)
    return Quadratics(sizes, curvatures, pulls / curvatures, start=1 / np.sqrt(steepness))


def _clients(sizes: Sequence[int]) -> Iterator[slice]:
    """The rows of each client."""
    ends = np.cumsum(sizes).tolist()
    return (slice(end - size, end) for end, size in zip(ends, sizes, strict=True))


# The measurements ----------------------------------------------------------------------------

Numbers = list[float]

Results = dict[str, dict[str, Any]]
"""For each panel: ``x``, the ``curves`` over it, perhaps their ``deviations`` (over the seeds) and
the theorem's ``bound``, or ``bounds``, one for each curve; and the ``facts``, the constants and
settings behind them."""

BURN_IN = 5.0
"""Stationary errors are taken after so many times 1 / (mu eta) rounds, in which the start is
forgotten, for as many rounds again."""

SERVER = 4.0
"""The server step size of ``cohort``: local steps are so much smaller that drift hardly counts."""

WALK = 1 / 40
"""The theorem on FedShuffleMVR: the epochs of a round are together a step of at most so many times
1 / delta."""

SHARE = 1152 * WALK**2
"""The theorem's least momentum parameter a for such steps, 0.72."""


@final
@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    seeds: int = 8
    halvings: int = 4
    """``noise``: the theorem's largest step size, its half, and so on."""
    cohorts: tuple[int, ...] = (1, 2, 4, 8, 16)
    epsilon: float = 0.004
    """``cohort``: the squared distance to reach. The start is at distance 1."""
    server_step_sizes: tuple[float, ...] = (1, 2, 4, 8, 16, 32)
    deltas: tuple[float, ...] = (0.4, 0.2, 0.1, 0.05, 0.025)
    gradient: float = 0.01
    """``similarity``: the share of the start's squared gradient to reach."""
    multiples: tuple[float, ...] = (8, 16, 32, 64)
    """``similarity``: among these multiples of the theorem's step size the best is looked for."""
    rounds: int = 400
    """``distance``, ``sampling`` and ``gradient``: how many."""


ORDERS = {
    "reshuffled": LocalWork(order="reshuffled"),
    "with replacement": LocalWork(order="replacement"),
}

SAMPLINGS = {"importance": "importance:{}", "uniform": "uniform:{}"}

WALKS, STAYS = "FedShuffleMVR", "non-local MVR"

PREDICTED = ("distance", "sampling", "gradient")
"""The panels with bounds over rounds, a figure of their own."""

COHORT = 8
"""``sampling``: so many of the hundred clients take part in a round."""


def noise(scale: Scale) -> Iterator[dict[str, Any]]:
    """The stationary error by the step size; full participation, so that sampling adds nothing."""
    chosen = alike()
    engine, known = LanesEngine(chosen.problem), chosen.constants
    federation = engine.problem.federation
    found = method_constants(federation, "fedshuffle")
    largest = largest_step_size(found, known.problem).eta_l
    etas = [largest / 2**k for k in range(scale.halvings)]
    table = []
    for eta in etas:
        runs = [
            Run(federation, "fedshuffle", "full", work, eta / found.longest, seed=s)
            for work in ORDERS.values()
            for s in range(scale.seeds)
        ]
        table.append(_stationary(engine, runs, known, eta).reshape(len(ORDERS), scale.seeds))
        yield {}
    yield {
        "x": etas,
        **_curves(np.stack(table, axis=1)),
        "bound": [_drift_bound(known, eta, drift_noise(found, known.problem)) for eta in etas],
        "facts": {**_facts(known), "largest eta_l": largest},
    }


def server(scale: Scale) -> Iterator[dict[str, Any]]:
    """The stationary error by the server step size, with eta_g eta_l kept."""
    chosen = apart()
    engine, known = LanesEngine(chosen.problem), chosen.constants
    federation = engine.problem.federation
    found = method_constants(federation, "fedshuffle")
    effective = largest_step_size(found, known.problem).effective
    steps = scale.server_step_sizes
    runs = [
        Run(
            federation,
            "fedshuffle",
            "full",
            work,
            effective / eta_g / found.longest,
            eta_g,
            seed=s,
        )
        for work in ORDERS.values()
        for eta_g in steps
        for s in range(scale.seeds)
    ]
    errors = _stationary(engine, runs, known, effective)
    size = drift_noise(found, known.problem)
    yield {
        "x": list(steps),
        **_curves(errors.reshape(len(ORDERS), len(steps), scale.seeds)),
        "bound": [_drift_bound(known, effective / eta_g, size) for eta_g in steps],
        "facts": {**_facts(known), "effective step": effective},
    }


def _stationary(
    engine: LanesEngine, runs: Sequence[Run], known: ExactConstants, effective: float
) -> FloatArray:
    """The squared distance to the optimum of each run, in the mean over rounds after a burn-in."""
    burn_in = math.ceil(BURN_IN / (known.mu_objective * effective))
    optimum = torch.from_numpy(known.x_star)
    states = [run.start(engine.problem.start) for run in runs]
    total = torch.zeros(len(runs), dtype=torch.float64)
    for r in range(2 * burn_in):
        states = play(engine, runs, states)
        if r >= burn_in:
            total += (torch.stack([state.x for state in states]) - optimum).square().sum(1)
    found: FloatArray = (total / burn_in).numpy()
    return found


def _drift_bound(known: ExactConstants, eta_l: float, size: float) -> float:
    """Where the bound on a round, ``(1 - mu eta / 2) e + 9 L eta eta_l^2 N``, stays as it is."""
    return 18.0 * known.L / known.mu * eta_l**2 * size


def _curves(table: FloatArray) -> dict[str, dict[str, Numbers]]:
    return {
        "curves": dict(zip(ORDERS, table.mean(axis=2).tolist(), strict=True)),
        "deviations": dict(zip(ORDERS, table.std(axis=2).tolist(), strict=True)),
    }


def _facts(known: ExactConstants) -> dict[str, float]:
    return {name: float(getattr(known, name)) for name in ("L", "mu", "G", "B", "delta")}


def cohort(scale: Scale) -> Iterator[dict[str, Any]]:
    """Rounds to a given error by the cohort size.

    The first term of the rate is M G^2 / (mu R). So the step size is the one for which that term is
    epsilon, eta = epsilon mu / (M G^2): at twice that step the noise alone could be epsilon.
    """
    chosen = many()
    engine, known = LanesEngine(chosen.problem), chosen.constants
    federation = engine.problem.federation
    optimum = torch.from_numpy(known.x_star)
    curves: dict[str, list[int | None]] = {name: [] for name in SAMPLINGS}
    facts: dict[str, Any] = {**_facts(known), "epsilon": scale.epsilon}
    facts["M"] = {name: [] for name in SAMPLINGS}
    facts["share of the limit"] = {name: [] for name in SAMPLINGS}
    for b in scale.cohorts:
        groups, most = {}, 0
        for name, form in SAMPLINGS.items():
            sampling = form.format(b)
            found = method_constants(federation, "fedshuffle", sampling)
            limit = largest_step_size(found, known.problem, server_step_size=SERVER)
            eta = scale.epsilon * known.mu / (found.M * known.G**2)
            facts["M"][name].append(found.M)
            facts["share of the limit"][name].append(eta / limit.effective)
            most = max(most, math.ceil(10 / (known.mu * eta)))
            step = eta / SERVER / found.longest
            groups[name] = [
                Run(federation, "fedshuffle", sampling, None, step, SERVER, seed=s)
                for s in range(scale.seeds)
            ]
        reached = _rounds(
            engine, groups, lambda x: (x - optimum).square().sum(1), scale.epsilon, most
        )
        for name in SAMPLINGS:
            curves[name].append(reached[name])
        yield {}
    yield {"x": list(scale.cohorts), "curves": curves, "facts": facts}


def similarity(scale: Scale) -> Iterator[dict[str, Any]]:
    """Rounds to a small gradient by delta / L; one client a round, as the theorem has it.

    FedShuffleMVR walks E = L / delta epochs, which together are a step of 1 / (40 delta). Without
    local steps it is 1 / (40 L), which is what the same bound gives with L in delta's place.
    """
    kinds = [f"{name}, {how}" for how in ("theorem", "best") for name in (WALKS, STAYS)]
    curves: dict[str, list[int | None]] = {kind: [] for kind in kinds}
    facts: dict[str, Any] = {"gradient": scale.gradient, "a": SHARE, "E": [], "constants": []}
    facts["best"] = {WALKS: [], STAYS: []}
    for delta in scale.deltas:
        chosen = similar(delta)
        engine, known = LanesEngine(chosen.problem), chosen.constants
        epochs = math.ceil(known.L / known.delta)
        groups = {
            (name, k): runs
            for k in (1.0, *scale.multiples)
            for name, runs in _with_mvr(engine.problem.federation, known, epochs, k, scale).items()
        }
        hessian, optimum = torch.from_numpy(chosen.hessian), torch.from_numpy(known.x_star)
        measure = partial(_squared_gradient, hessian, optimum)
        level = scale.gradient * float(measure(engine.problem.start[None]))
        reached = _rounds(engine, groups, measure, level, most=10_000)
        facts["E"].append(epochs)
        facts["constants"].append(_facts(known))
        for name in (WALKS, STAYS):
            tried = {k: reached[name, k] for k in scale.multiples}
            done = {k: rounds for k, rounds in tried.items() if rounds is not None}
            best = min(done, key=lambda k: done[k], default=None)
            curves[f"{name}, theorem"].append(reached[name, 1.0])
            curves[f"{name}, best"].append(None if best is None else done[best])
            facts["best"][name].append(best)
        yield {}
    ratios = [known["delta"] / known["L"] for known in facts["constants"]]
    yield {"x": ratios, "curves": curves, "facts": facts}


def _with_mvr(
    federation: Federation, known: ExactConstants, epochs: int, k: float, scale: Scale
) -> dict[str, list[Run]]:
    """Both methods with k times the theorem's step size."""
    walks = methods.get("fedshuffle").with_momentum(MVR(SHARE))
    stays = methods.get(f"non-local-mvr:a={SHARE}")
    work = LocalWork(epochs=epochs)
    longest = epochs * int(federation.sizes.max())
    near, far = k * WALK / known.L, k * WALK / known.delta / longest
    return {
        WALKS: [Run(federation, walks, "one", work, far, seed=s) for s in range(scale.seeds)],
        STAYS: [Run(federation, stays, "one", None, near, seed=s) for s in range(scale.seeds)],
    }


def _squared_gradient(hessian: Tensor, optimum: Tensor, x: Tensor) -> Tensor:
    return (hessian * (x - optimum)).square().sum(1)


def _rounds(
    engine: LanesEngine,
    groups: Mapping[Any, Sequence[Run]],
    measure: Callable[[Tensor], Tensor],
    level: float,
    most: int,
) -> dict[Any, int | None]:
    """After how many rounds each group's mean of a measure is at the level; None for never."""
    reached: dict[Any, int | None] = dict.fromkeys(groups)
    states = {
        key: [run.start(engine.problem.start) for run in runs] for key, runs in groups.items()
    }
    hopeless = 100 * float(measure(engine.problem.start[None]))
    for r in range(1, most + 1):
        if not states:
            break
        runs = [run for key in states for run in groups[key]]
        after = iter(play(engine, runs, [state for mine in states.values() for state in mine]))
        for key in list(states):
            states[key] = [next(after) for _ in states[key]]
            mean = float(measure(torch.stack([state.x for state in states[key]])).mean())
            if mean <= level:
                reached[key] = r
            if not level < mean < hopeless:
                del states[key]
    return reached


def distance(scale: Scale) -> Iterator[dict[str, Any]]:
    """All clients take part: what the bound cannot exclude is drift, less with larger eta_g."""
    kinds = {f"eta_g = {eta_g:g}": ("full", eta_g) for eta_g in (1.0, SERVER)}
    yield _distances(replace(apart(), start=many().start), kinds, scale)


def samplings(scale: Scale) -> Iterator[dict[str, Any]]:
    """A few clients take part, and the smaller M is, the lower is the bound."""
    kinds = {name: (form.format(COHORT), SERVER) for name, form in SAMPLINGS.items()}
    yield _distances(many(), kinds, scale)


def _distances(
    chosen: Quadratics, kinds: Mapping[str, tuple[str, float]], scale: Scale
) -> dict[str, Any]:
    """FedShuffle's distance to the optimum, for each sampling and server step size."""
    engine, known = LanesEngine(chosen.problem), chosen.constants
    optimum = torch.from_numpy(known.x_star)
    begin = float(((chosen.start - known.x_star) ** 2).sum())
    groups, bounds = {}, {}
    for name, (drawn, eta_g) in kinds.items():
        groups[name], bounds[name] = _bounded_runs(
            engine, known, drawn, scale, "strongly-convex", begin, eta_g
        )
    return _predicted(engine, known, groups, bounds, lambda x: (x - optimum).square().sum(1))


def gradient(scale: Scale) -> Iterator[dict[str, Any]]:
    """One client a round, drawn by weight; with one epoch, the models of the theorem on
    FedShuffleMVR are those before each round. Neither bound makes use of convexity.
    """
    chosen = many()
    engine, known = LanesEngine(chosen.problem), chosen.constants
    federation = engine.problem.federation
    begin = 0.5 * float(chosen.hessian @ (chosen.start - known.x_star) ** 2)
    runs, bound = _bounded_runs(engine, known, "one", scale, "non-convex", begin)
    setting = mvr_setting(federation, known.problem, known.delta)
    tuned = mvr_tune(scale.rounds, setting, start=begin, bound="proof")
    walks = methods.get("fedshuffle").with_momentum(MVR(tuned.a))
    with_mvr = [
        Run(federation, walks, "one", None, tuned.step_size, seed=s) for s in range(scale.seeds)
    ]
    ours = mvr_bound(scale.rounds, setting, tuned.step_size, tuned.a, start=begin)
    hessian, optimum = torch.from_numpy(chosen.hessian), torch.from_numpy(known.x_star)
    panel = _predicted(
        engine,
        known,
        {"FedShuffle": runs, WALKS: with_mvr},
        {"FedShuffle": bound, WALKS: ours},
        partial(_squared_gradient, hessian, optimum),
        so_far=True,
    )
    yield {**panel, "facts": {**panel["facts"], "a": tuned.a}}


def _bounded_runs(
    engine: LanesEngine,
    known: ExactConstants,
    drawn: str,
    scale: Scale,
    regime: Regime,
    begin: float,
    eta_g: float = 1.0,
) -> tuple[list[Run], FloatArray]:
    """Runs of FedShuffle, and the bound on them: tuned to it, within the theorem's limit."""
    federation, losses = engine.problem.federation, known.problem
    found = method_constants(federation, "fedshuffle", drawn)
    quantity = "gradient" if regime == "non-convex" else "distance"
    asked: dict[str, Any] = {"regime": regime, "start": begin, "quantity": quantity}
    best = tune(scale.rounds, found, losses, server_step_size=eta_g, **asked)
    limit = largest_step_size(found, losses, server_step_size=eta_g)
    step = min(best.step_size, limit.step_size)
    bound = upper_bound(scale.rounds, found, losses, step, eta_g, **asked)
    runs = [
        Run(federation, "fedshuffle", drawn, None, step, eta_g, seed=s) for s in range(scale.seeds)
    ]
    return runs, bound


def _predicted(
    engine: LanesEngine,
    known: ExactConstants,
    groups: Mapping[str, Sequence[Run]],
    bounds: Mapping[str, FloatArray],
    measure: Callable[[Tensor], Tensor],
    so_far: bool = False,
) -> dict[str, Any]:
    """A measure after each round, or its mean over the models before each round so far."""
    runs = [run for mine in groups.values() for run in mine]
    states = [run.start(engine.problem.start) for run in runs]
    x = np.arange(1, len(next(iter(bounds.values()))))
    columns = [measure(torch.stack([state.x for state in states]))]
    for _ in x:
        states = play(engine, runs, states)
        columns.append(measure(torch.stack([state.x for state in states])))
    table = torch.stack(columns, dim=1).numpy()
    table = table[:, :-1].cumsum(axis=1) / x if so_far else table[:, 1:]
    seen = dict(zip(groups, np.split(table, len(groups)), strict=True))
    return {
        "x": x.tolist(),
        "curves": {name: values.mean(axis=0).tolist() for name, values in seen.items()},
        "deviations": {name: values.std(axis=0).tolist() for name, values in seen.items()},
        "bounds": {name: bound[1:].tolist() for name, bound in bounds.items()},
        "facts": {
            **_facts(known),
            "step sizes": {name: mine[0].step_size for name, mine in groups.items()},
        },
    }


PANELS: dict[str, Callable[[Scale], Iterator[dict[str, Any]]]] = {
    "noise": noise,
    "cohort": cohort,
    "server": server,
    "similarity": similarity,
    "distance": distance,
    "sampling": samplings,
    "gradient": gradient,
}


def compute(scale: Scale | None = None, progress: bool = False) -> Results:
    """All panels; each yields after every part of its work, and at last its result."""
    scale = Scale() if scale is None else scale
    parts = scale.halvings + len(scale.cohorts) + len(scale.deltas) + len(PANELS)
    results: Results = {}
    for name, part in track(_parts(scale), "measuring", total=parts, disable=not progress):
        if part:
            results[name] = part
    return results


def _parts(scale: Scale) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, panel in PANELS.items():
        for part in panel(scale):
            yield name, part


# The claims ----------------------------------------------------------------------------------

CLOSE = 0.25
"""A slope is as claimed if it is this close."""

CLEARLY = 2.0
"""So many times as many rounds are clearly more."""


def slope(x: Sequence[float], y: Sequence[float | None]) -> float:
    """By which power of x y goes: the slope of the line through the logarithms.

    >>> round(slope([1, 2, 4], [5, 20, 80]), 9)
    2.0
    """
    if None in y or len(y) < 2:
        return math.nan
    return float(np.polyfit(np.log(x), np.log(np.array(y, dtype=np.float64)), 1)[0])


def claims(results: Results) -> list[Claim]:
    """What the theory says, held against what was measured."""
    return [
        *_noise(results["noise"]),
        *_cohort(results["cohort"]),
        *_server(results["server"]),
        *_similarity(results["similarity"]),
        *(_under(name, results[name]) for name in PREDICTED),
    ]


def _noise(panel: Mapping[str, Any]) -> Iterator[Claim]:
    quiet, loud = panel["curves"]["reshuffled"], panel["curves"]["with replacement"]
    yield _slope(
        "noise", "Reshuffled, the stationary error goes with eta^2.", panel["x"], quiet, 2.0
    )
    yield _slope("noise", "With replacement, it goes with eta only.", panel["x"], loud, 1.0)
    yield _bounded("noise", panel)


def _cohort(panel: Mapping[str, Any]) -> Iterator[Claim]:
    x, few, more = panel["x"], panel["curves"]["importance"], panel["curves"]["uniform"]
    within = max(max(shares) for shares in panel["facts"]["share of the limit"].values())
    yield _slope(
        "cohort",
        "Under importance sampling the rounds to a given error go with 1/b: linear speed-up.",
        x,
        few,
        -1.0,
        f" Rounds: {_list(few)} for b = {_list(x)}. The step sizes are at most {within:.2f} of the"
        " theorem's limit.",
    )
    ratios = _ratios(more, few)
    predicted = _ratios(panel["facts"]["M"]["uniform"], panel["facts"]["M"]["importance"])
    yield Claim(
        "cohort",
        "Importance sampling needs fewer rounds than uniform sampling, as its M is smaller.",
        bool(ratios) and min(ratios) >= CLEARLY,
        f"Rounds of uniform sampling: {_list(more)}, {_range(ratios)} times as many; its M is"
        f" {_range(predicted)} times as large.",
    )


def _server(panel: Mapping[str, Any]) -> Iterator[Claim]:
    still = slope(panel["x"], panel["curves"]["with replacement"])
    yield _slope(
        "server",
        "The middle term vanishes as eta_g grows, with 1 / eta_g^2, at the same effective step.",
        panel["x"],
        panel["curves"]["reshuffled"],
        -2.0,
        f" With replacement the noise stays: slope {still:.2f}.",
    )
    yield _bounded("server", panel)


def _similarity(panel: Mapping[str, Any]) -> Iterator[Claim]:
    x, curves = panel["x"], panel["curves"]
    few, more = curves[f"{WALKS}, theorem"], curves[f"{STAYS}, theorem"]
    yield _slope(
        "similarity",
        "FedShuffleMVR's rounds go with delta, at the same L.",
        x,
        few,
        1.0,
        f" Rounds: {_list(few)} for delta/L = {_list(x)}.",
    )
    yield _slope(
        "similarity",
        "Those of MVR without local steps do not: they go with L.",
        x,
        more,
        0.0,
        f" Rounds: {_list(more)}.",
    )
    for how, where in (
        ("theorem", "the theorem's step sizes"),
        ("best", "the best found for each"),
    ):
        few, more = curves[f"{WALKS}, {how}"], curves[f"{STAYS}, {how}"]
        last = _ratios(more[-1:], few[-1:])
        yield Claim(
            "similarity",
            f"FedShuffleMVR beats non-local MVR when delta is much smaller than L, at {where}.",
            bool(last) and last[0] >= CLEARLY,
            f"At delta/L = {x[-1]:.3g}: {_count(few[-1])} rounds against {_count(more[-1])}; at"
            f" {x[0]:.3g}: {_count(few[0])} against {_count(more[0])}.",
        )


def _slope(
    panel: str,
    text: str,
    x: Sequence[float],
    y: Sequence[float | None],
    claimed: float,
    more: str = "",
) -> Claim:
    found = round(slope(x, y), 2) + 0.0  # no minus before a zero
    seen = abs(found - claimed) <= CLOSE
    return Claim(panel, text, seen, f"Slope {found:.2f}, claimed {claimed:g}.{more}")


def _bounded(name: str, panel: Mapping[str, Any]) -> Claim:
    room = np.array(panel["bound"]) / np.array(panel["curves"]["reshuffled"])
    return Claim(
        name,
        "The reshuffled error stays under the theorem's bound, 18 (L/mu) eta_l^2 N.",
        bool((room >= 1).all()),
        f"The bound is {_range(room.tolist())} times as large.",
    )


def _under(name: str, panel: Mapping[str, Any]) -> Claim:
    room = {
        kind: np.array(panel["bounds"][kind]) / np.array(curve)
        for kind, curve in panel["curves"].items()
    }
    evidence = "; ".join(
        f"{kind}: {each.min():.4g} times as large at the closest (round"
        f" {panel['x'][int(each.argmin())]}), {each[-1]:.3g} at the end"
        for kind, each in room.items()
    )
    return Claim(
        name,
        "The measured mean stays under the bound in every round.",
        all(bool((each >= 1).all()) for each in room.values()),
        f"The bound is, for {evidence}.",
    )


def _ratios(more: Sequence[float | None], few: Sequence[float | None]) -> list[float]:
    """Nothing, if a number is missing."""
    pairs = [(a, b) for a, b in zip(more, few, strict=True) if a is not None and b is not None]
    return [a / b for a, b in pairs] if len(pairs) == len(more) else []


def _count(rounds: float | None) -> str:
    return "never" if rounds is None else f"{rounds:.3g}" if rounds < 1 else f"{rounds:g}"


def _list(values: Sequence[float | None]) -> str:
    return ", ".join(_count(value) for value in values)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}" if values else "some"


# The command ---------------------------------------------------------------------------------


def reproduce(out: Path, scale: Scale | None = None, progress: bool = True) -> list[Claim]:
    """Measure all panels and leave ``theory.png``, ``bounds.png``, the same as ``.pdf``,
    ``results.json`` and ``claims.md``.
    """
    out = results_folder(out)
    # Drawing needs matplotlib, which nothing else here does.
    from fedshuffle.report import quadratic
    from fedshuffle.report import theory as report

    results = compute(scale, progress)
    found = claims(results)
    (out / "results.json").write_text(json.dumps(results), encoding="utf-8")
    (out / "claims.md").write_text(report.markdown(found), encoding="utf-8")
    report.figure(results, out / "theory")
    report.bounds(results, out / "bounds")
    if progress:
        console = Console()
        console.print(quadratic.table(found))
        console.print(f"\nThe figures, their numbers and the evidence for each claim are in {out}.")
    return found
