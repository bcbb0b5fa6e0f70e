"""The theory's own claims, measured on quadratic problems whose constants are exact.

Step sizes are those that the theorems allow. Each panel is a function of its own below;
docs/research/theory-experiments.md says what each shows, and what not.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from rich.progress import MofNCompleteColumn
from torch import Tensor

from fedshuffle import methods, theory
from fedshuffle._arrays import FloatArray
from fedshuffle._terminal import progress_bar
from fedshuffle.engines import VectorizedEngine
from fedshuffle.experiments import toy_problems
from fedshuffle.experiments.toy_problems import Quadratics, trajectory
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import MVR, Method
from fedshuffle.training.rounds import Run, run_round

PanelData = dict[str, Any]
"""``x``, the ``curves`` over it, perhaps their ``deviations`` (over the seeds) and the theorem's
``bound``, or ``bounds``, one per curve; and the ``facts``: the constants and settings behind them.
"""

Results = dict[str, PanelData]

BURN_IN = 5.0
"""Stationary errors are measured after this many times 1 / (mu eta) rounds, in which the start is
forgotten, for as many rounds again."""
SERVER = 4.0
"""The server step size of ``cohort``: local steps are smaller by this factor, so drift is small."""
LOCAL_STEP = 1 / 40
"""The theorem on FedShuffleMVR: the epochs of a round sum to at most this times 1/delta."""
SHARE = 1152 * LOCAL_STEP**2  # the theorem's smallest momentum parameter for such steps, 0.72
COHORT = 8
"""``sampling``: this many of the hundred clients take part in a round."""

ORDERS = {"reshuffled": LocalWork(), "with replacement": LocalWork(order="replacement")}
SAMPLINGS = {"importance": "importance:{}", "uniform": "uniform:{}"}
LOCAL, NON_LOCAL = "FedShuffleMVR", "non-local MVR"


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    seeds: int = 8
    halvings: int = 4  # `noise`: the theorem's largest step size, its half, and so on
    cohorts: tuple[int, ...] = (1, 2, 4, 8, 16)
    epsilon: float = 0.004  # `cohort`: the squared distance to reach. The start is at distance 1
    server_step_sizes: tuple[float, ...] = (1, 2, 4, 8, 16, 32)
    deltas: tuple[float, ...] = (0.4, 0.2, 0.1, 0.05, 0.025)
    gradient: float = 0.01  # `similarity`: the share of the start's squared gradient to reach
    multiples: tuple[float, ...] = (8, 16, 32, 64)
    """``similarity``: the best multiple of the theorem's step size is searched among these."""
    rounds: int = 400  # `distance`, `sampling` and `gradient`: the number of rounds


class Bench:
    """A problem with its engine, its exact constants, and runs on it."""

    def __init__(self, chosen: Quadratics, scale: Scale) -> None:
        self.scale, self.known = scale, chosen.constants
        self.engine = VectorizedEngine(chosen.problem)
        self.federation = self.engine.problem.federation
        self.start = self.engine.problem.start[None]
        self.hessian = torch.from_numpy(chosen.hessian)
        self.optimum = torch.from_numpy(self.known.x_star)
        names = ("L", "mu", "G", "B", "delta")
        self.facts: dict[str, Any] = {name: float(getattr(self.known, name)) for name in names}

    def runs(self, step_size: float, method: str | Method = "fedshuffle", **more: Any) -> list[Run]:
        """A run for each seed."""
        seeds = range(self.scale.seeds)
        return [Run(self.federation, method, step_size=step_size, seed=s, **more) for s in seeds]

    def measure(self, quantity: theory.Quantity, x: Tensor) -> Tensor:
        """Of each row: the squared distance to the optimum, or the squared gradient."""
        away = x - self.optimum
        return (away if quantity == "distance" else self.hessian * away).square().sum(1)

    def constants(self, sampling: str = "full") -> theory.MethodConstants:
        """The constants of FedShuffle under a sampling."""
        return theory.method_constants(self.federation, "fedshuffle", sampling)

    def stationary(self, *groups: Sequence[tuple[float, float]]) -> PanelData:
        """The mean squared distance after a burn-in, for each order and (eta_l, eta_g).

        The bound is the fixed point of that per round, ``(1 - mu eta / 2) e + 9 L eta eta_l^2 N``.
        The steps of a group have the same effective size, and run together.
        """
        limits, tables = self.constants(), []
        for steps in groups:
            runs = [
                run
                for work in ORDERS.values()
                for eta_l, eta_g in steps
                for run in self.runs(eta_l / limits.max_steps, work=work, server_step_size=eta_g)
            ]
            burn_in = math.ceil(BURN_IN / (self.known.mu_objective * math.prod(steps[0])))
            total = torch.zeros(len(runs), dtype=torch.float64)
            for x in islice(trajectory(self.engine, runs, 2 * burn_in), burn_in + 1, None):
                total += self.measure("distance", x)
            shape = (len(ORDERS), len(steps), self.scale.seeds)
            tables.append(np.asarray(total / burn_in).reshape(shape))
        factor = 18.0 * self.known.L / self.known.mu
        size = theory.drift_noise(limits, self.known.problem)
        return {
            **_over_seeds(ORDERS, np.concatenate(tables, axis=1), axis=1),
            "bound": [factor * eta_l**2 * size for steps in groups for eta_l, _ in steps],
        }

    def rounds(
        self, quantity: theory.Quantity, level: float, most: int, groups: Mapping[Any, list[Run]]
    ) -> dict[Any, int | None]:
        """The number of rounds until each group's mean is at the level; None for never."""
        reached: dict[Any, int | None] = dict.fromkeys(groups)
        states = {key: [run.start(self.start[0]) for run in runs] for key, runs in groups.items()}
        hopeless = 100 * float(self.measure(quantity, self.start))
        for r in range(1, most + 1):
            runs = [run for key in states for run in groups[key]]
            before = [state for mine in states.values() for state in mine]
            after = iter(run_round(self.engine, runs, before))
            for key in list(states):
                states[key] = list(islice(after, len(states[key])))
                models = torch.stack([state.x for state in states[key]])
                mean = float(self.measure(quantity, models).mean())
                if mean <= level:
                    reached[key] = r
                if not level < mean < hopeless:
                    del states[key]
            if not states:
                break
        return reached

    def begin(self, quantity: theory.Quantity) -> float:
        """What the bounds start from: the squared distance, or for gradients f(x) - f*."""
        away = (self.start[0] - self.optimum).numpy() ** 2
        return float(away.sum() if quantity == "distance" else 0.5 * (self.hessian.numpy() @ away))

    def bounded(
        self, sampling: str, eta_g: float = 1.0, quantity: theory.Quantity = "distance"
    ) -> tuple[list[Run], FloatArray]:
        """Runs of FedShuffle, and the bound on them: tuned to it, within the theorem's limit."""
        losses, rounds, found = self.known.problem, self.scale.rounds, self.constants(sampling)
        regime: theory.Regime = "strongly-convex" if quantity == "distance" else "non-convex"
        rate = theory.ConvergenceRate(found, losses, regime=regime, server_step_size=eta_g)
        limit = theory.largest_step_size(found, losses, server_step_size=eta_g)
        begin = self.begin(quantity)
        tuned = rate.tune(rounds, start=begin, quantity=quantity)
        step = min(tuned.step_size, limit.step_size)
        runs = self.runs(step, sampling=sampling, server_step_size=eta_g)
        return runs, rate.curve(rounds, step, start=begin, quantity=quantity)

    def under_bounds(
        self, quantity: theory.Quantity, bounded: Mapping[str, tuple[list[Run], FloatArray]]
    ) -> PanelData:
        """Distances after each round; of gradients, the mean over the models before each so far."""
        runs = [run for mine, _ in bounded.values() for run in mine]
        x = np.arange(1, self.scale.rounds + 1)
        models = trajectory(self.engine, runs, len(x))
        table = torch.stack([self.measure(quantity, y) for y in models], dim=1).numpy()
        table = table[:, 1:] if quantity == "distance" else table[:, :-1].cumsum(axis=1) / x
        steps = {name: mine[0].step_size for name, (mine, _) in bounded.items()}
        return {
            "x": x.tolist(),
            **_over_seeds(bounded, np.split(table, len(bounded)), axis=0),
            "bounds": {name: bound[1:].tolist() for name, (_, bound) in bounded.items()},
            "facts": {**self.facts, "step sizes": steps},
        }


def _over_seeds(names: Iterable[str], tables: Iterable[FloatArray], axis: int) -> PanelData:
    """Mean and standard deviation over the seeds."""
    named = dict(zip(names, tables, strict=True))
    return {
        "curves": {name: table.mean(axis=axis).tolist() for name, table in named.items()},
        "deviations": {name: table.std(axis=axis).tolist() for name, table in named.items()},
    }


def noise(scale: Scale) -> PanelData:
    """The stationary error by the step size; full participation, so that sampling adds nothing."""
    bench = Bench(toy_problems.alike(), scale)
    largest = theory.largest_step_size(bench.constants(), bench.known.problem).eta_l
    etas = [largest / 2**k for k in range(scale.halvings)]
    found = bench.stationary(*([(eta, 1.0)] for eta in etas))
    return {"x": etas, **found, "facts": {**bench.facts, "largest eta_l": largest}}


def server(scale: Scale) -> PanelData:
    """The stationary error by the server step size, with eta_g eta_l constant."""
    bench = Bench(toy_problems.apart(), scale)
    effective = theory.largest_step_size(bench.constants(), bench.known.problem).effective
    found = bench.stationary([(effective / eta_g, eta_g) for eta_g in scale.server_step_sizes])
    facts = {**bench.facts, "effective step": effective}
    return {"x": list(scale.server_step_sizes), **found, "facts": facts}


def cohort(scale: Scale) -> PanelData:
    """Rounds to a given error by the cohort size.

    The first term of the rate is M G^2 / (mu R). So the step size is the one for which that term is
    epsilon, eta = epsilon mu / (M G^2): at twice that step the noise alone could be epsilon.
    """
    bench = Bench(toy_problems.many(), scale)
    known = bench.known
    curves, variances, shares = (defaultdict[str, list[Any]](list) for _ in range(3))
    for b in scale.cohorts:
        groups, most = {}, 0
        for name, form in SAMPLINGS.items():
            found = bench.constants(form.format(b))
            limit = theory.largest_step_size(found, known.problem, server_step_size=SERVER)
            eta = scale.epsilon * known.mu / (found.M_1 * known.G**2)
            variances[name].append(found.M_1)
            shares[name].append(eta / limit.effective)
            most = max(most, math.ceil(10 / (known.mu * eta)))
            groups[name] = bench.runs(
                eta / SERVER / found.max_steps, sampling=form.format(b), server_step_size=SERVER
            )
        for name, reached in bench.rounds("distance", scale.epsilon, most, groups).items():
            curves[name].append(reached)
    own = {"epsilon": scale.epsilon, "M": variances, "share of the limit": shares}
    return {"x": list(scale.cohorts), "curves": curves, "facts": bench.facts | own}


def similarity(scale: Scale) -> PanelData:
    """Rounds to a small gradient by delta / L; one client per round, as the theorem has it.

    FedShuffleMVR runs E = L / delta epochs, which sum to a step of 1 / (40 delta). Without local
    steps it is 1 / (40 L), which is what the same bound gives with L in the place of delta.
    """
    names = (LOCAL, NON_LOCAL)
    curves = {f"{name}, {how}": list[Any]() for how in ("theorem", "best") for name in names}
    facts: dict[str, Any] = {"gradient": scale.gradient, "a": SHARE, "E": [], "constants": []}
    facts["best"] = {name: [] for name in names}
    local = methods.get("fedshuffle").with_momentum(MVR(SHARE))
    non_local = methods.get(f"non-local-mvr:a={SHARE}")
    for delta in scale.deltas:
        bench = Bench(toy_problems.similar(delta), scale)
        epochs = math.ceil(bench.known.L / bench.known.delta)
        longest = epochs * int(bench.federation.sizes.max())
        groups: dict[tuple[str, float], list[Run]] = {}
        work = LocalWork(epochs=epochs)
        for k in (1.0, *scale.multiples):
            far, near = k * LOCAL_STEP / bench.known.delta / longest, k * LOCAL_STEP / bench.known.L
            groups[LOCAL, k] = bench.runs(far, local, sampling="one", work=work)
            groups[NON_LOCAL, k] = bench.runs(near, non_local, sampling="one")
        level = scale.gradient * float(bench.measure("gradient", bench.start))
        reached = bench.rounds("gradient", level, 10_000, groups)
        facts["E"].append(epochs)
        facts["constants"].append(bench.facts)
        for name in names:
            done = {k: r for k in scale.multiples if (r := reached[name, k]) is not None}
            best = min(done, key=lambda k: done[k], default=None)
            curves[f"{name}, theorem"].append(reached[name, 1.0])
            curves[f"{name}, best"].append(None if best is None else done[best])
            facts["best"][name].append(best)
    ratios = [known["delta"] / known["L"] for known in facts["constants"]]
    return {"x": ratios, "curves": curves, "facts": facts}


def distance(scale: Scale) -> PanelData:
    """The distance to the optimum over the rounds, under the bound of the proof with its constants.

    All clients take part: what the bound cannot exclude is drift, less with larger eta_g.
    """
    bench = Bench(replace(toy_problems.apart(), start=toy_problems.many().start), scale)
    kinds = {f"eta_g = {eta_g:g}": bench.bounded("full", eta_g) for eta_g in (1.0, SERVER)}
    return bench.under_bounds("distance", kinds)


def sampling(scale: Scale) -> PanelData:
    """The same with a few clients per round: the smaller M is, the lower is the bound."""
    bench = Bench(toy_problems.many(), scale)
    kinds = {name: bench.bounded(form.format(COHORT), SERVER) for name, form in SAMPLINGS.items()}
    return bench.under_bounds("distance", kinds)


def gradient(scale: Scale) -> PanelData:
    """The running mean of the squared gradient, of FedShuffle and FedShuffleMVR.

    One client per round, drawn by weight; with one epoch, the models of the theorem on
    FedShuffleMVR are those before each round. Neither bound makes use of convexity.
    """
    bench = Bench(toy_problems.many(), scale)
    known, begin = bench.known, bench.begin("gradient")
    rate = theory.MVRRate(bench.federation, known.problem, known.delta)
    tuned = rate.tune(scale.rounds, start=begin, bound="proof")
    with_mvr = methods.get("fedshuffle").with_momentum(MVR(tuned.a))
    kinds = {
        "FedShuffle": bench.bounded("one", quantity="gradient"),
        LOCAL: (
            bench.runs(tuned.step_size, with_mvr, sampling="one"),
            rate.curve(scale.rounds, tuned.step_size, tuned.a, start=begin),
        ),
    }
    panel = bench.under_bounds("gradient", kinds)
    return {**panel, "facts": {**panel["facts"], "a": tuned.a}}


MEASURED = (noise, cohort, server, similarity)
PREDICTED = (distance, sampling, gradient)
"""The panels with bounds over rounds, in a figure of their own."""


def compute(scale: Scale | None = None, progress: bool = False) -> Results:
    scale = Scale() if scale is None else scale
    with progress_bar(progress, MofNCompleteColumn(), "panels") as bars:
        panels = bars.track(MEASURED + PREDICTED, description="measuring")
        return {panel.__name__: panel(scale) for panel in panels}
