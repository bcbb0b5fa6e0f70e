r"""The paper's toy figures: :math:`|x^r - x^*|^2` over the rounds, and what the text says of them.

The problem is :math:`f_{ij}(x) = \frac12 |x - e_j|^2`: clients hold 1, 2 and 3 of the canonical
basis vectors of :math:`R^6` (8, 1 and 1 of :math:`R^{10}` for importance sampling), every client
runs one epoch with batch size 1, from 0. Panels ``full``, ``momentum``, ``sum_one`` and
``importance`` are the paper's first figure, ``hybrid`` is from its appendix. Curves are means over
three seeds, bands one standard deviation of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from fedshuffle import methods
from fedshuffle._arrays import FloatArray
from fedshuffle._terminal import progress_bar
from fedshuffle.auditing import Audit, audit, contributions
from fedshuffle.engines import VectorizedEngine
from fedshuffle.experiments.quadratics import toy, trajectory
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork, MissLast
from fedshuffle.methods import MVR, Method
from fedshuffle.training.rounds import Run

SEEDS = (123, 124, 125)
Key = TypeVar("Key")

Results = dict[str, dict[str, dict[str, list[float]]]]
"""``{panel: {method: {"mean": [...], "std": [...]}}}`` with one value per round."""

EPOCH, UNFINISHED = LocalWork(), LocalWork(interruption=MissLast(1))


@dataclass(frozen=True)
class Scenario:
    """What one curve shows. ``eta`` is the paper's eta_l: the steps of a client sum to it."""

    method: Method
    eta: float
    sampling: str = "full"
    work: LocalWork = EPOCH
    sizes: tuple[int, ...] = (1, 2, 3)

    @property
    def federation(self) -> Federation:
        """The clients with their basis vectors."""
        return toy(self.sizes).problem.federation

    @property
    def step_size(self) -> float:
        """The step of a client with the most steps: eta divided by that number."""
        workload = self.method.local_work(self.work).on(np.array(self.sizes))
        everyone = np.arange(len(self.sizes))
        return self.eta / int(workload.plan(everyone, seed=0, round=0).planned.max())

    def run(self, seed: int) -> Run:
        """The scenario with a seed, ready to be simulated."""
        settings = (self.federation, self.method, self.sampling, self.work, self.step_size)
        return Run(*settings, seed=seed)

    def audit(self) -> Audit:
        """The objective that the scenario really minimises."""
        return audit(self.federation, self.method, self.sampling, self.work)

    def bias(self) -> float:
        """``|x^ - x*|^2`` between the optimum of the effective objective and the intended one.

        A client's own optimum is the mean of its basis vectors: they are orthogonal, with squared
        length ``1 / |D_i|``.
        """
        found = self.audit()
        gap = found.effective_weights - found.objective_weights
        return float((gap**2 / np.array(self.sizes)).sum())

    def pace(self) -> float:
        """How far a round of full participation moves along the gradient."""
        cohort = self.run(seed=0).cohort(round=0)
        return self.step_size * float(contributions(self.method, cohort).sum())


DISTANCE = r"$\|x^r - x^\star\|^2$"
TITLES = {
    "full": "Full participation",
    "momentum": "Full participation, momentum 0.9",
    "sum_one": "Two of three clients per round",
    "importance": "One of three clients per round",
    "hybrid": "Clients miss their last step",
}
"""The panels: four in the first figure, the last in the appendix."""

_SAMPLINGS = {
    "fedshuffle-uniform": ("FedShuffle, uniform", "#0072B2"),
    "fedshuffle-importance": ("FedShuffle w/ IS", "#009E73"),
}


def label(curve: str) -> str:
    """How the figure calls a curve: by its method, or by its sampling."""
    return _SAMPLINGS[curve][0] if curve in _SAMPLINGS else methods.label(curve)


def colour(curve: str) -> str:
    """The colour of a curve."""
    return _SAMPLINGS[curve][1] if curve in _SAMPLINGS else methods.colour(curve)


def panels() -> dict[str, dict[str, Scenario]]:
    """Every curve of every panel, with the step sizes of the paper's authors."""
    get = methods.get
    averaging = ["fedavg", "fedavg-rr", "fedavg-min", "fedavg-mean", "fednova", "fednova-rr"]
    all_methods, uneven = [*averaging, "fedshuffle"], (8, 1, 1)
    return {
        "full": {name: Scenario(get(name), 1 / 80) for name in all_methods},
        "momentum": {
            name: Scenario(get(name).with_momentum(MVR(0.1)), 1 / 80) for name in all_methods
        },
        "sum_one": {
            name: Scenario(get(name), 1 / 160, "uniform:2")
            for name in ("fedshuffle-so", "fedshuffle")
        },
        "importance": {
            "fedshuffle-uniform": Scenario(get("fedshuffle"), 1 / 500, "uniform:1", sizes=uneven),
            "fedshuffle-importance": Scenario(get("fedshuffle"), 1 / 300, "one", sizes=uneven),
        },
        "hybrid": {
            name: Scenario(get(name), 1 / 80, work=UNFINISHED)
            for name in ("fednova-rr", "fedshuffle", "fedshuffle-gen")
        },
    }


def compute(rounds: int, progress: bool = False) -> Results:
    """The curves of all panels."""
    scenarios = {(panel, name): s for panel, row in panels().items() for name, s in row.items()}
    runs = {place: [s.run(seed) for seed in SEEDS] for place, s in scenarios.items()}
    results: Results = {panel: {} for panel, _ in scenarios}
    for (panel, name), curves in distances(runs, rounds, progress).items():
        mean, std = curves.mean(axis=0), curves.std(axis=0)
        results[panel][name] = {"mean": mean.tolist(), "std": std.tolist()}
    return results


def distances(
    runs: Mapping[Key, Sequence[Run]], rounds: int, progress: bool = False
) -> dict[Key, FloatArray]:
    """``|x - x*|^2`` on the toy problem, by run and round; runs on the same clients in lockstep."""
    clients = {key: tuple(mine[0].federation.sizes.tolist()) for key, mine in runs.items()}
    found: dict[Key, FloatArray] = {}
    for sizes in dict.fromkeys(clients.values()):
        same = [key for key in runs if clients[key] == sizes]
        together = [run for key in same for run in runs[key]]
        models = trajectory(VectorizedEngine(toy(sizes).problem), together, rounds)
        text = f"{len(together)} runs in R^{sum(sizes)}"
        with progress_bar(progress, MofNCompleteColumn(), "rounds", TimeRemainingColumn()) as bars:
            after = bars.track(islice(models, 1, None), rounds, description=text)
            columns = [(x - 1 / sum(sizes)).square().sum(1).numpy() for x in after]
        table = np.stack(columns, axis=-1).reshape(len(same), -1, rounds)
        found |= dict(zip(same, table, strict=True))
    return found
