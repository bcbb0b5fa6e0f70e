"""How a server behaves, as far as an audit can see, and what is wrong with that."""

from dataclasses import dataclass, replace

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.estimation import Observations
from fedshuffle.auditing.findings import CLOSE, Finding, findings_of, uneven, why_not_normalise
from fedshuffle.federation import Federation


@dataclass(frozen=True)
class ServerProperties:
    """How a server behaves; None for what was not, or could not be, tested."""

    linear: bool | None = None  # whether a step is a weighted sum of the updates
    repeatable: bool | None = None  # whether the same replies give a fresh server the same step
    stateful: bool | None = None  # whether a step depends on earlier rounds
    long_run_gain: float | None = None  # long-run step over the first, with the same updates
    ordered: bool | None = None  # whether the order of the replies matters
    only_client_counted: str | None = None  # 'last' or 'first' if no other of a cohort counts
    moves_without_updates: bool | None = None  # whether the model moves although no client does
    fails_on_zero_updates: bool | None = None  # whether no finite step follows if no client moves
    optimiser: bool = False  # whether the weights are those of the average an optimiser gets
    uses_sizes: bool | None = None  # whether another number of examples changes the step
    uses_steps: bool | None = None  # whether another number of local steps changes the step
    sums_to: float | None = None  # the sum of aggregation weights, if the same in every cohort
    constant: bool | None = None  # whether a client's weight is the same in every cohort
    form: str | None = None  # a simple rule for the aggregation weights within a cohort
    non_finite_rounds: int = 0  # rounds with a step that is not finite; they are left out
    ignored_rounds: int = 0  # rounds that did not move the model although their clients had moved
    rounds: int = 0  # all rounds of the audit

    def facts(self) -> list[str]:
        """The properties that are no fault, as sentences."""
        gain = self.long_run_gain
        grows = "" if gain is None else f" (in the long run a step is {gain:.3g} times the first)"
        facts = [
            (self.linear, "a step is a weighted sum of the updates"),
            (self.repeatable is False, "the same replies do not always give the same step"),
            (self.sums_to is not None, f"aggregation weights sum to {self.sums_to or 0:.4g}"),
            (self.constant, "a client's weight does not depend on who else takes part"),
            (self.form, f"within a cohort clients are weighted {self.form}"),
            (self.stateful, f"remembers earlier rounds{grows}"),
        ]
        return [text for true, text in facts if true]

    def findings(
        self,
        biased: bool,
        weights: tuple[FloatArray, FloatArray],
        probabilities: FloatArray,
        steps: tuple[int, int] | None,
        sampled: bool,
    ) -> list[Finding]:
        """What is wrong with the server and, if its weights (objective, effective) are biased, why.

        ``steps`` are the fewest and the most if these make a difference. If cohorts are not
        ``sampled``, as in a log, chance alone makes the probabilities differ.
        """
        form, (low, high) = self.form or "", steps or (0, 0)
        by_steps = biased and steps is not None and "/ steps" not in form and "/ (steps" not in form
        ignores_sizes = form == "all alike" or (self.uses_sizes is False and not form)
        ignores_sizes = biased and ignores_sizes and uneven(weights[0])
        partial = biased and bool((probabilities < 1).any())
        by_probability = biased and sampled and uneven(probabilities)
        causes = {
            "not finite": self.non_finite_rounds,
            "drift": self.moves_without_updates,
            "unbounded": self.long_run_gain == np.inf,
            "only one": self.only_client_counted,
            "order": self.ordered and not self.only_client_counted,
            "fails": self.fails_on_zero_updates,
            "optimiser": self.linear is False and self.optimiser,
            "not linear": self.linear is False and not self.optimiser,
            "ignored": self.ignored_rounds,
            "steps": by_steps,
            "sizes": ignores_sizes,
            "normalised": partial and self.sums_to is not None and not self.constant,
            "probability": by_probability and "probability" not in form,
        }
        why = why_not_normalise(*weights, other_causes=by_steps or ignores_sizes)
        at = {"low": low, "high": high, "at": "at one step size", "instead": ""}
        return findings_of(causes, why_not_normalise=why, **at, **vars(self))


def describe_weights(
    server: ServerProperties, federation: Federation, probabilities: FloatArray, seen: Observations
) -> ServerProperties:
    """The properties with those of the aggregation weights that were seen."""
    moved = np.bincount(seen.round, weights=np.abs(seen.weight))[seen.round] > 0
    client, weight, steps = seen.client[moved], seen.weight[moved], seen.steps[moved]
    if not len(weight):
        return server
    _, first, cohort = np.unique(seen.round[moved], return_index=True, return_inverse=True)

    def fits(rule: FloatArray) -> bool:
        ratio = weight / rule
        return bool(np.allclose(ratio, ratio[first][cohort], rtol=CLOSE, atol=0))

    forms: list[str] = []
    if len(weight) > len(first):  # else every client is alone in its cohort
        rules = _weight_rules(federation, client, probabilities[client], steps.astype(np.float64))
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


def _weight_rules(
    federation: Federation, client: IntArray, p: FloatArray, steps: FloatArray
) -> dict[str, FloatArray]:
    """Simple rules for aggregation weights, the plainest first."""
    size, ones = federation.sizes[client].astype(np.float64), np.ones(len(client))
    bases = {"size": size, "the objective's weight": federation.weights[client], "1": ones}
    divisors = {
        "": ones,
        " / inclusion probability": p,
        " / steps": steps,
        " / (steps x inclusion probability)": steps * p,
    }
    rules = {"all alike": ones}
    for over, divisor in divisors.items():
        rules |= {f"by {base}{over}": value / divisor for base, value in bases.items()}
    return rules | {"by steps": steps, "by size x steps": size * steps}
