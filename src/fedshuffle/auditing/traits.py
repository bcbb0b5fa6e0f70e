"""What can be told of a server from its answers: its traits, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.findings import Finding, divided_by_a_larger_sum

CLOSE = 1e-5
"""Answers within this relative distance count as equal: servers may compute in single precision."""


@final
@dataclass(frozen=True)
class Traits:
    """How a server behaves. None where that was not, or could not be, tested."""

    linear: bool | None = None
    """Whether a step is a weighted sum of the updates."""
    repeatable: bool | None = None
    """Whether the same replies give a fresh server the same step."""
    remembers: bool | None = None
    """Whether a step depends on earlier rounds."""
    gain: float | None = None
    """How many times as far as at first a constant update moves a server that remembers, in the
    long run; infinite where steps grow without bound."""
    ordered: bool | None = None
    """Whether the order in which replies come in matters."""
    only: str | None = None
    """'last' or 'first' if all other clients of a cohort are ignored."""
    drifts: bool | None = None
    """Whether the model moves although no client does."""
    fails_still: bool | None = None
    """Whether it fails, or gives no finite step, where no client moves."""
    optimiser: bool = False
    """Whether the weights are those of the average that an optimiser of the server gets."""
    uses_sizes: bool | None = None
    uses_steps: bool | None = None
    """Whether another number of examples, or of steps, changes the step."""
    sums_to: float | None = None
    """What the aggregation weights sum to, if that is the same in every cohort."""
    constant: bool | None = None
    """Whether a client's aggregation weight is the same in every cohort."""
    form: str | None = None
    """To what the aggregation weights in a cohort are proportional, if to anything simple."""
    broken: int = 0
    """Rounds whose step was not finite; they are left out."""
    idle: int = 0
    """Rounds that did not move the model although all their clients had moved."""
    rounds: int = 0
    """Rounds probed in all."""

    def facts(self) -> list[str]:
        """The traits as sentences."""
        told = [
            (self.linear is True, "a step is a weighted sum of the updates"),
            (self.linear is False and not self.optimiser, "not linear in the updates"),
            (self.optimiser, "not linear in the updates, but in the average that it makes of them"),
            (self.repeatable is False, "the same replies do not always give the same step"),
            (self.sums_to is not None, f"aggregation weights sum to {self.sums_to or 0:.4g}"),
            (self.constant is True, "a client's weight does not depend on who else takes part"),
            (self.form is not None, f"within a cohort clients are weighed {self.form}"),
            (self.ordered is True, "the order of the clients matters"),
            (self.fails_still is True, "fails where no client moves"),
            (self.drifts is True, "moves although no client moves"),
            (self.remembers is True, f"remembers earlier rounds{self._gained()}"),
            (bool(self.idle), f"ignored all clients in {self.idle} of {self.rounds} rounds"),
            (bool(self.broken), f"gave no finite step in {self.broken} of {self.rounds} rounds"),
        ]
        return [text for true, text in told if true]

    def _gained(self) -> str:
        return (
            ""
            if self.gain is None
            else f" (in the long run a step is {self.gain:.3g} times the first)"
        )


@final
@dataclass(frozen=True, eq=False)
class Coefficients:
    """Aggregation weights as seen in some cohorts: entries of equal length."""

    cohort: IntArray
    client: IntArray
    weight: FloatArray
    size: IntArray
    steps: IntArray
    probability: FloatArray
    objective: FloatArray

    def sums_to(self) -> float | None:
        """The sum over a cohort, if it is the same in all."""
        sums = np.bincount(self.cohort, weights=self.weight).astype(np.float64)
        return float(sums[0]) if _alike(sums) else None

    def constant(self) -> bool | None:
        """Whether each client's weight is always the same; None if nobody was seen twice."""
        order = np.argsort(self.client, kind="stable")
        same = np.diff(self.client[order]) == 0
        if not same.any():
            return None
        weight = self.weight[order]
        return bool(np.allclose(weight[1:][same], weight[:-1][same], rtol=CLOSE, atol=0))

    def form(self, uses_sizes: bool | None, uses_steps: bool | None) -> str | None:
        """The first of some simple rules that fits within every cohort."""
        if len(self.weight) == len(np.unique(self.cohort)):  # nobody to compare with
            return None
        size, steps = self.size.astype(np.float64), self.steps.astype(np.float64)
        p, w, one = self.probability, self.objective, np.ones(len(self.size))
        rules: Mapping[str, FloatArray] = {
            "all alike": one,
            "by size": size,
            "by the objective's weight": w,
            "by size / inclusion probability": size / p,
            "by the objective's weight / inclusion probability": w / p,
            "by 1 / inclusion probability": 1 / p,
            "by size / steps": size / steps,
            "by the objective's weight / steps": w / steps,
            "by size / (steps x inclusion probability)": size / steps / p,
            "by the objective's weight / (steps x inclusion probability)": w / steps / p,
            "by 1 / steps": 1 / steps,
            "by steps": steps,
            "by size x steps": size * steps,
        }
        fits = [name for name, rule in rules.items() if self._fits(rule)]
        # Where rules coincide on these clients, what the server was seen to use decides.
        known = [("size", uses_sizes), ("steps", uses_steps)]
        for word, used in known:
            better = [name for name in fits if used is None or (word in name) == used]
            fits = better or fits
        return fits[0] if fits else None

    def _fits(self, rule: FloatArray) -> bool:
        ratio = self.weight / rule
        first = np.unique(self.cohort, return_index=True)[1]
        return bool(np.allclose(ratio, ratio[first][self.cohort], rtol=CLOSE, atol=0))


def _alike(values: FloatArray) -> bool:
    return bool(np.ptp(values) <= CLOSE * np.abs(values).max())


def long_run(norms: Sequence[float]) -> float:
    """The long-run step of a server that gets the same updates again and again, over its first.

    Momentum closes a constant share of the gap in every round, so three steps tell its limit.

    >>> long_run([1.0, 1.9, 2.71, 3.439, 4.0951, 4.68559, 5.217031, 5.6953279])
    10.0
    """
    steps = np.asarray(norms)
    grown = np.diff(steps)
    quarter = max(len(grown) // 4, 1)
    early, late = grown[:quarter].mean(), grown[-quarter:].mean()
    if late > CLOSE * steps[0] and late >= early * (1 - 1e-9):
        return float("inf")
    bend = grown[-1] - grown[-2]
    limit = steps[-1] if abs(bend) < 1e-12 * steps[0] else steps[-1] - grown[-1] ** 2 / bend
    return float(np.round(limit / steps[0], 9))


def find_traits(traits: Traits) -> list[Finding]:
    """What is wrong with a server whatever its weights are."""
    found = []
    if traits.broken:
        found.append(
            Finding(
                f"{traits.broken} of {traits.rounds} rounds gave NaN or infinity.",
                "One such step destroys the model for good.",
                "Look for divisions by zero: cohorts of one client, clients that did not move.",
            )
        )
    if traits.drifts:
        found.append(
            Finding(
                "The model moves although no client moves.",
                "It is led away from every objective that clients have.",
                "Add nothing to the step that does not come from updates.",
            )
        )
    if traits.gain == float("inf"):
        found.append(
            Finding(
                "The steps grow without bound while clients send the same updates.",
                "Memory is fed back with a factor of one or more, so any step size diverges.",
                "Let momentum decay, and add it once.",
            )
        )
    if traits.only:
        found.append(
            Finding(
                f"Only the {traits.only} client of a cohort counts.",
                "What all other clients have done is thrown away.",
                "Sum the updates instead of overwriting the sum.",
            )
        )
    elif traits.ordered:
        found.append(
            Finding(
                "The step depends on the order in which clients come in.",
                "Fast clients count otherwise than slow ones.",
                "Let the weights depend on who takes part, not on when.",
            )
        )
    if traits.fails_still:
        found.append(
            Finding(
                "The server fails where no client moves.",
                "A client that has nothing to learn, or has converged, stops the training.",
                "Look for divisions by the norm of an update.",
            )
        )
    if traits.linear is False and traits.optimiser:
        found.append(
            Finding(
                "The server's optimiser is not linear in the updates.",
                "The weights are those of the average that it gets; with cohorts that differ, it"
                " may shift them further.",
                "Judge by the weights where the optimiser's steps are small.",
            )
        )
    elif traits.linear is False:
        found.append(
            Finding(
                "Not linear in the updates.",
                "No weighted sum of the clients' objectives is minimised; the weights tell how the"
                " server answers to small differences between clients that move alike.",
                "Trust the weights only near a point where clients agree.",
            )
        )
    if traits.idle:
        found.append(
            Finding(
                f"{traits.idle} of {traits.rounds} rounds ignored all their clients.",
                "Clients that are mostly sampled in such rounds count too little.",
                "Let every cohort move the model.",
            )
        )
    return found


def find_bias(
    traits: Traits,
    objective: FloatArray,
    effective: FloatArray,
    *,
    partial: bool,
    uneven_steps: tuple[int, int] | None,
    uneven_weights: bool,
    uneven_probabilities: bool,
) -> list[Finding]:
    """The causes of a bias that traits explain."""
    found, form = [], traits.form or ""
    if uneven_steps and "/ steps" not in form and "/ (steps" not in form:
        found.append(
            Finding(
                f"Clients take from {uneven_steps[0]} to {uneven_steps[1]} local steps at one step"
                " size, and the server counts by steps.",
                "A client that takes more steps moves the model further, and nothing makes up for"
                " it.",
                "Divide each client's step size, or its weight, by its number of steps.",
            )
        )
    if uneven_weights and (form == "all alike" or (traits.uses_sizes is False and not form)):
        found.append(
            Finding(
                "The server ignores how many examples clients have.",
                "Small clients count like large ones.",
                "Weigh clients by size, or say that you mean an objective of equal weights.",
            )
        )
    if partial and traits.sums_to is not None and not traits.constant:
        found.append(
            Finding(
                "The weights sum to one over the cohort."
                if abs(traits.sums_to - 1) < CLOSE
                else f"The weights sum to {traits.sums_to:.4g} in every cohort.",
                divided_by_a_larger_sum(objective, effective, others=bool(found)),
                "Divide each client's weight by its inclusion probability instead.",
            )
        )
    if uneven_probabilities and "probability" not in form:
        found.append(
            Finding(
                "The server ignores inclusion probability.",
                "Clients that take part more often count more.",
                "Divide each client's weight by its inclusion probability.",
            )
        )
    return found
