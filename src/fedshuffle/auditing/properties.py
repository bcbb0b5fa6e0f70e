"""Properties of a server, as its steps show them, and the findings that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.findings import Finding, why_not_normalise
from fedshuffle.federation import Federation

CLOSE = 1e-5
"""Answers within this relative distance count as equal: servers may compute in single precision."""


@dataclass(frozen=True)
class ServerProperties:
    """How a server behaves; None for what was not, or could not be, tested."""

    linear: bool | None = None  # whether a step is a weighted sum of the updates
    repeatable: bool | None = None  # whether the same replies give a fresh server the same step
    stateful: bool | None = None  # whether a step depends on earlier rounds
    long_run_gain: float | None = (
        None  # long-run step over the first, under constant updates; may be inf
    )
    ordered: bool | None = None  # whether the order of the replies matters
    only_client_counted: str | None = (
        None  # 'last' or 'first' if all other clients of a cohort are ignored
    )
    moves_without_updates: bool | None = None  # whether the model moves although no client does
    fails_on_zero_updates: bool | None = (
        None  # whether it gives no finite step where no client moves
    )
    optimiser: bool = False  # whether the weights are those of the average an optimiser gets
    uses_sizes: bool | None = None  # whether another number of examples changes the step
    uses_steps: bool | None = None  # whether another number of local steps changes the step
    sums_to: float | None = None  # the sum of aggregation weights, if the same in every cohort
    constant: bool | None = None  # whether a client's weight is the same in every cohort
    form: str | None = None  # a simple rule for the aggregation weights within a cohort
    non_finite_rounds: int = 0  # rounds with a step that is not finite; they are left out
    ignored_rounds: int = (
        0  # rounds that did not move the model although all their clients had moved
    )
    rounds: int = 0  # all rounds of the audit

    def facts(self) -> list[str]:
        """The properties as sentences."""
        gain = f" (in the long run a step is {self.long_run_gain or 0:.3g} times the first)"
        facts = [
            (self.linear is True, "a step is a weighted sum of the updates"),
            (self.linear is False and not self.optimiser, "not linear in the updates"),
            (self.optimiser, "not linear in the updates, but in the average that it makes of them"),
            (self.repeatable is False, "the same replies do not always give the same step"),
            (self.sums_to is not None, f"aggregation weights sum to {self.sums_to or 0:.4g}"),
            (self.constant is True, "a client's weight does not depend on who else takes part"),
            (self.form is not None, f"within a cohort clients are weighed {self.form}"),
            (self.ordered is True, "the order of the clients matters"),
            (self.fails_on_zero_updates is True, "fails if no client moves"),
            (self.moves_without_updates is True, "moves although no client moves"),
            (
                self.stateful,
                f"remembers earlier rounds{'' if self.long_run_gain is None else gain}",
            ),
            (
                self.ignored_rounds,
                f"ignored all clients in {self.ignored_rounds} of {self.rounds} rounds",
            ),
            (
                self.non_finite_rounds,
                f"gave no finite step in {self.non_finite_rounds} of {self.rounds} rounds",
            ),
        ]
        return [text for true, text in facts if true]

    def findings(self) -> list[Finding]:
        """What is wrong with the server, whatever its weights are."""
        table = [
            (
                self.non_finite_rounds,
                f"{self.non_finite_rounds} of {self.rounds} rounds gave NaN or infinity.",
                "One such step destroys the model for good.",
                "Look for divisions by zero: cohorts of one client, clients that did not move.",
            ),
            (
                self.moves_without_updates,
                "The model moves although no client moves.",
                "It is led away from every objective that clients have.",
                "Add nothing to the step that does not come from updates.",
            ),
            (
                self.long_run_gain == np.inf,
                "The steps grow without bound while clients send the same updates.",
                "Memory is fed back with a factor of one or more, so any step size diverges.",
                "Let momentum decay, and add it once.",
            ),
            (
                self.only_client_counted,
                f"Only the {self.only_client_counted} client of a cohort counts.",
                "The updates of all other clients are thrown away.",
                "Sum the updates instead of overwriting the sum.",
            ),
            (
                self.ordered and not self.only_client_counted,
                "The step depends on the order in which replies arrive.",
                "Fast clients count differently from slow ones.",
                "Let the weights depend on who takes part, not on when.",
            ),
            (
                self.fails_on_zero_updates,
                "The server fails if no client moves.",
                "A client that has nothing to learn, or has converged, stops the training.",
                "Look for divisions by the norm of an update.",
            ),
            (
                self.linear is False and self.optimiser,
                "The server's optimiser is not linear in the updates.",
                "The weights are those of the average that it gets; if cohorts differ, it may shift"
                " them further.",
                "Judge by the weights where the optimiser's steps are small.",
            ),
            (
                self.linear is False and not self.optimiser,
                "Not linear in the updates.",
                "No weighted sum of the clients' objectives is minimised; the weights describe the"
                " response to small differences between clients that move alike.",
                "Trust the weights only near a point where clients agree.",
            ),
            (
                self.ignored_rounds,
                f"{self.ignored_rounds} of {self.rounds} rounds ignored all their clients.",
                "Clients that are mostly sampled in such rounds count too little.",
                "Let every cohort move the model.",
            ),
        ]
        return [Finding(what, why, fix) for true, what, why, fix in table if true]


def describe_weights(
    server: ServerProperties,
    federation: Federation,
    probabilities: FloatArray,
    cohort: IntArray,
    client: IntArray,
    weight: FloatArray,
    steps: IntArray,
) -> ServerProperties:
    """The properties with those of the aggregation weights that were seen in some cohorts, given as
    entries of equal length, sorted by cohort.
    """
    first = np.unique(cohort, return_index=True)[1]

    def fits(rule: FloatArray) -> bool:
        ratio = weight / rule
        return bool(np.allclose(ratio, ratio[first][cohort], rtol=CLOSE, atol=0))

    size, tau = federation.sizes[client].astype(np.float64), steps.astype(np.float64)
    p, w = probabilities[client], federation.weights[client]
    rules: Mapping[str, FloatArray] = {
        "all alike": np.ones(len(weight)),
        "by size": size,
        "by the objective's weight": w,
        "by size / inclusion probability": size / p,
        "by the objective's weight / inclusion probability": w / p,
        "by 1 / inclusion probability": 1 / p,
        "by size / steps": size / tau,
        "by the objective's weight / steps": w / tau,
        "by size / (steps x inclusion probability)": size / tau / p,
        "by the objective's weight / (steps x inclusion probability)": w / tau / p,
        "by 1 / steps": 1 / tau,
        "by steps": tau,
        "by size x steps": size * tau,
    }
    forms = []
    if len(weight) > len(first):  # else every client is alone in its cohort
        forms = [name for name, rule in rules.items() if fits(rule)]
    # If several rules coincide on these clients, what the server was seen to use decides.
    for word, used in [("size", server.uses_sizes), ("steps", server.uses_steps)]:
        forms = [name for name in forms if used is None or (word in name) == used] or forms
    server = replace(server, form=forms[0] if forms else None)
    if server.linear is False:  # a common factor of the answers is not a weight
        return server
    sums = np.bincount(cohort, weights=weight).astype(np.float64)
    alike = np.ptp(sums) <= CLOSE * np.abs(sums).max()
    order = np.argsort(client, kind="stable")
    again, by_client = np.diff(client[order]) == 0, weight[order]
    constant = None
    if again.any() and len(first) > 1:  # clients were seen in several cohorts
        pairs = by_client[1:][again], by_client[:-1][again]
        constant = bool(np.allclose(*pairs, rtol=CLOSE, atol=0))
    return replace(server, sums_to=float(sums[0]) if alike else None, constant=constant)


def estimate_gain(norms: Sequence[float]) -> float:
    """The long-run step of a server that gets the same updates in every round, over its first step.

    Momentum closes a constant share of the gap in every round, so three steps give its limit.

    >>> estimate_gain([1.0, 1.9, 2.71, 3.439, 4.0951, 4.68559, 5.217031, 5.6953279])
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


def bias_findings(
    server: ServerProperties,
    objective: FloatArray,
    effective: FloatArray,
    *,
    partial: bool,
    uneven_steps: tuple[int, int] | None,
    uneven_probabilities: bool,
) -> list[Finding]:
    """The causes of a bias that the properties of a server explain."""
    form = server.form or ""
    steps = uneven_steps is not None and "/ steps" not in form and "/ (steps" not in form
    sizes = form == "all alike" or (server.uses_sizes is False and not form)
    sizes = sizes and uneven(objective)
    low, high = uneven_steps or (0, 0)
    sums = server.sums_to or 0
    table = [
        (
            steps,
            f"Clients take from {low} to {high} local steps at one step size, and the server counts"
            " by steps.",
            "A client that takes more steps moves the model further, and nothing makes up for it.",
            "Divide each client's step size, or its weight, by its number of steps.",
        ),
        (
            sizes,
            "The server ignores how many examples clients have.",
            "Small clients count like large ones.",
            "Weigh clients by size, or say that you mean an objective of equal weights.",
        ),
        (
            partial and server.sums_to is not None and not server.constant,
            "The weights sum to one over the cohort."
            if abs(sums - 1) < CLOSE
            else f"The weights sum to {sums:.4g} in every cohort.",
            why_not_normalise(objective, effective, other_causes=steps or sizes),
            "Divide each client's weight by its inclusion probability instead.",
        ),
        (
            uneven_probabilities and "probability" not in form,
            "The server ignores inclusion probability.",
            "Clients that take part more often count more.",
            "Divide each client's weight by its inclusion probability.",
        ),
    ]
    return [Finding(what, why, fix) for true, what, why, fix in table if true]


def uneven(values: FloatArray) -> bool:
    """Whether these numbers are not all the same."""
    return bool(np.ptp(values) > 1e-9 * np.abs(values).max())
