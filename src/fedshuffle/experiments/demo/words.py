"""The sentences of the demo. Each follows from the numbers; none knows how the demo ends."""

from __future__ import annotations

from fedshuffle.experiments.demo.experiment import MethodSummary, Spread, Summary
from fedshuffle.reports.page import joined, number, percent

_NEAR = 1.5
"""Levels within this factor of each other count as the same."""


def same_objective(method: MethodSummary) -> str:
    """Whether a method minimises the intended objective, in a word."""
    return {True: "yes", False: "no", None: "cannot tell"}[method.consistent]


def headline(summary: Summary) -> str:
    """The demo in one line: how well the digits that mostly small clients hold are read."""
    if not summary.rare_digits:
        return "When clients differ in size, which objective does federated training minimise?"
    worst, best = furthest_apart(summary)
    first, last = worst.accuracy_rare, best.accuracy_rare
    if worst is best or first.mean >= last.mean or _within_spread(first, last):
        return (
            "The digits of small clients: no method reads them better than"
            f" {worst.label} ({first.mean:.0%})"
        )
    return (
        f"The digits of small clients: {first.mean:.0%} right with {worst.label},"
        f" {last.mean:.0%} with {best.label}"
    )


def furthest_apart(summary: Summary) -> tuple[MethodSummary, MethodSummary]:
    """The method that reads the digits of small clients worst, and the one nearest the optimum."""
    worst = min(summary.methods, key=lambda method: method.accuracy_rare.mean)
    return worst, min(summary.methods, key=lambda method: method.reached.mean)


def reason(summary: Summary) -> str:
    """How much the small clients count, beside what was meant."""
    worst, best = furthest_apart(summary)
    text = f"You meant the small clients to count {percent(summary.small_weight)}."
    if worst is best:
        return f"{text} With {best.label} they count {percent(best.small_weight)}."
    return (
        f"{text} With {worst.label} they count {percent(worst.small_weight)}, with"
        f" {best.label} {percent(best.small_weight)}."
    )


def objectives(summary: Summary) -> str:
    """Which methods minimise the intended objective."""
    sentences = []
    for consistent, what in (
        (True, "the objective you meant"),
        (None, "the objective you meant, as far as the audit can tell"),
        (False, "another objective"),
    ):
        found = [method for method in summary.methods if method.consistent is consistent]
        if found:
            verb = "minimises" if len(found) == 1 else "minimise"
            sentences.append(f"{joined([m.label for m in found])} {verb} {what}.")
        if found and consistent is False:
            shares = joined([percent(method.total_variation) for method in found])
            sentences.append(f"There, {shares} of the weight is in the wrong place.")
    return " ".join(sentences)


def answer(summary: Summary) -> str:
    """Who came closest to the optimum of the intended objective, and how far the others are."""
    first, *others = sorted(summary.methods, key=lambda method: method.reached.mean)
    gaps = []
    for method in others:
        ratio = method.reached.mean / first.reached.mean
        gaps.append(f"{ratio:.{1 if ratio < 10 else 0}f} times as much with {method.label}")
    text = (
        f"After {summary.rounds} rounds {first.label} is closest to the optimum you meant:"
        f" {number(first.reached.mean)} is left to gain, {joined(gaps)}."
    )
    alike = [method for method in others if _within_spread(first.reached, method.reached)]
    if alike:
        names = joined([method.label for method in [first, *alike]])
        text += f" Between {names} the gap is within the spread of the runs."
    return text


def _within_spread(one: Spread, other: Spread) -> bool:
    return abs(one.mean - other.mean) <= one.std + other.std


def ranking(summary: Summary) -> str:
    """Whether the audit ranked the methods as training did."""
    reached = sorted(summary.methods, key=lambda method: method.reached.mean)
    predicted = sorted(summary.methods, key=lambda method: method.predicted)
    names = ", ".join(method.label for method in predicted)
    if reached == predicted:
        return f"The audit had put them in this order, before any training: {names}."
    return (
        f"The audit had put them in another order ({names}): what is left after"
        f" {summary.rounds} rounds is not bias alone."
    )


def settled(method: MethodSummary) -> str:
    """Where a method stands beside the level that the audit predicts for it."""
    reached, predicted = method.reached.mean, method.predicted
    if predicted == 0:
        return (
            f"{number(reached)} above the optimum. The audit finds no bias: what is left is noise"
            " and unfinished work, which more rounds with smaller steps remove."
        )
    both = f"{number(reached)} above the optimum, where the audit predicts {number(predicted)}"
    if predicted / _NEAR <= reached <= predicted * _NEAR:
        return f"{both}. It has settled where the audit said: more rounds do not help."
    if reached > predicted:
        return f"{both}. It is not there yet: noise and unfinished work outweigh its bias so far."
    return f"{both}. It is still below, on its way: more rounds would make it worse."


def pays(method: MethodSummary) -> str:
    """Who is worse off than at the optimum."""

    def apart(difference: float) -> str:
        return f"{number(abs(difference))} {'higher' if difference > 0 else 'lower'}"

    return (
        f"the loss of small clients is {apart(method.excess_small)} than at the optimum you meant,"
        f" that of large clients {apart(method.excess_large)}."
    )


def who_pays(summary: Summary) -> str:
    """The method and the clients with the largest cost, and what it does to accuracy."""
    worst = max(summary.methods, key=lambda method: max(method.excess_small, method.excess_large))
    group = "small" if worst.excess_small > worst.excess_large else "large"
    text = f"The highest price is paid under {worst.label}, by the {group} clients: {pays(worst)}"
    if summary.rare_digits:
        lost = summary.best_accuracy_rare - worst.accuracy_rare.mean
        text += (
            f" On the digits that mostly small clients hold ({joined(summary.rare_digits)}) its"
            f" test accuracy is {100 * abs(lost):.1f} points {'below' if lost > 0 else 'above'}"
            " that of the optimum."
        )
    return text


def early_and_late(summary: Summary) -> str:
    """Who leads when noise decides, and who when bias does."""
    early = min(summary.methods, key=lambda method: method.early.mean)
    late = min(summary.methods, key=lambda method: method.reached.mean)
    then = f"After {summary.early_round} rounds {early.label} was closest"
    if early.method == late.method:
        return f"{then}, and after {summary.rounds} it still is."
    return f"{then}; after {summary.rounds} it is {late.label}."
