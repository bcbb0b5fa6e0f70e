"""The demo in words: its sentences, its page, and its summary on a terminal.

Each sentence follows from the numbers; none knows how the demo ends.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fedshuffle._arrays import FloatArray
from fedshuffle._terminal import plain_table
from fedshuffle.experiments.demo import experiment
from fedshuffle.experiments.demo.experiment import ALL, RARE, DemoResult, MethodResult, seeds
from fedshuffle.experiments.demo.figures import PICTURES, embedded
from fedshuffle.reports.page import joined, number, percent, render
from fedshuffle.reports.style import DARK, LIGHT

FILES = {"page": "report.html", "picture": "picture.png", "results": "results.json"}
"""What the demo writes."""
SAME = {True: "yes", False: "no", None: "cannot tell"}
"""Whether a method minimises the intended objective, by what the audit calls consistent."""


def headline(demo: DemoResult) -> str:
    """How well the digits that mostly small clients hold are read."""
    worst, best = _furthest_apart(demo)
    first, last = worst.rare.mean(), best.rare.mean()
    if first >= last or _within_spread(worst.rare, best.rare):
        found = f"no method reads them better than {worst.label} ({first:.0%})"
    else:
        found = f"{first:.0%} right with {worst.label}, {last:.0%} with {best.label}"
    return f"The digits of small clients: {found}"


def reason(demo: DemoResult) -> str:
    """How much the small clients count, beside what was meant."""
    small, counts = demo.digits.small, []
    for method in dict.fromkeys(_furthest_apart(demo)):
        share = percent(method.audit.effective_weights[small].sum())
        counts.append(f"with {method.label} they count {share}")
    meant = percent(demo.digits.federation.weights[small].sum())
    return f"You meant the small clients to count {meant}; {joined(counts)}."


def answer(demo: DemoResult) -> str:
    """Who came closest to the optimum of the intended objective, and whether the audit knew."""
    first, *others = sorted(demo.methods, key=lambda method: method.left.mean())
    gaps = []
    for method in others:
        ratio = method.left.mean() / first.left.mean()
        gaps.append(f"{ratio:.{1 if ratio < 10 else 0}f} times as much with {method.label}")
    text = (
        f"After {demo.rounds} rounds {first.label} is closest to the optimum you meant:"
        f" {number(first.left.mean())} is left to gain, {joined(gaps)}."
    )
    alike = [method.label for method in others if _within_spread(first.left, method.left)]
    if alike:
        names = joined([first.label, *alike])
        text += f" Between {names} the gap is within the spread of the runs."
    if sorted(demo.methods, key=lambda method: method.predicted) == [first, *others]:
        return f"{text} The audit had put them in this order, before any training."
    return f"{text} The audit had put them in another order: what is left is not bias alone."


def who_pays(demo: DemoResult) -> str:
    """The method and the clients with the largest cost, and what it does to accuracy."""
    small = demo.digits.small
    costs = {m: {"small": m.excess_of(small), "large": m.excess_of(~small)} for m in demo.methods}
    worst = max(costs, key=lambda method: max(costs[method].values()))
    group = max(costs[worst], key=lambda name: costs[worst][name])
    apart = {
        name: f"{number(abs(cost))} {'higher' if cost > 0 else 'lower'}"
        for name, cost in costs[worst].items()
    }
    lost = demo.optimal_accuracies[RARE].mean() - worst.rare.mean()
    return (
        f"The highest price is paid under {worst.label}, by the {group} clients: the loss of small"
        f" clients is {apart['small']} than at the optimum you meant, that of large clients"
        f" {apart['large']}. On the digits that mostly small clients hold"
        f" ({joined(demo.digits.rare_digits)}) its test accuracy is {100 * abs(lost):.1f} points"
        f" {'below' if lost > 0 else 'above'} that of the optimum."
    )


def _furthest_apart(demo: DemoResult) -> tuple[MethodResult, MethodResult]:
    """The method that reads the digits of small clients worst, and the one nearest the optimum."""
    worst = min(demo.methods, key=lambda method: method.rare.mean())
    return worst, min(demo.methods, key=lambda method: method.left.mean())


def _within_spread(one: FloatArray, other: FloatArray) -> bool:
    """Whether means over runs differ by no more than their standard deviations together."""
    return bool(abs(one.mean() - other.mean()) <= one.std(ddof=1) + other.std(ddof=1))


def _mean_and_std(values: FloatArray) -> str:
    return f"{number(values.mean())} ± {number(values.std(ddof=1))}"


def render_page(demo: DemoResult, out: Path) -> str:
    """The text of the page, which needs no other file."""
    sizes = demo.digits.federation.sizes
    command = ["fedshuffle", "demo", "--out", str(out), "--seed", str(demo.seed)]
    command += ["--rounds", str(demo.rounds)] if demo.rounds != experiment.ROUNDS else []
    return render(
        "experiments/demo",
        "demo.html",
        {"mean_and_std": _mean_and_std},
        demo=demo,
        digits=demo.digits,
        settings=experiment,
        headline=headline(demo),
        reason=reason(demo),
        answer=answer(demo),
        who_pays=who_pays(demo),
        same=SAME,
        # each for light and for dark pages
        pictures={name: [embedded(name, demo, t) for t in (LIGHT, DARK)] for name in PICTURES},
        sizes=sizes,
        steps=-(-sizes // experiment.BATCH_SIZE),
        night=DARK,
        seeds=seeds(demo.seed),
        command=shlex.join(command),
        files=FILES,
    )


def print_summary(console: Console, demo: DemoResult, out: Path) -> None:
    """Print the demo on one screen."""
    table = plain_table(
        *("method", "wrong\nweight", "as\nmeant?", "error\npredicted", "error left\nmean ± std"),
        *("test\naccuracy", "digits of\nthe small"),
        align="lrlrrrr",
        no_wrap=True,
    )
    for method in demo.methods:
        same = method.audit.consistent
        table.add_row(
            method.label,
            percent(method.audit.total_variation),
            Text(SAME[same], style={True: "green", False: "red", None: "yellow"}[same]),
            number(method.predicted),
            _mean_and_std(method.left),
            *(percent(method.accuracies[part].mean()) for part in (ALL, RARE)),
        )
    best = [percent(demo.optimal_accuracies[part].mean()) for part in (ALL, RARE)]
    table.add_row("the optimum", "", "", "", "0", *best, style="dim")

    console.print(Text(headline(demo), style="bold"))
    console.print(Text(f"{reason(demo)}\n"))
    console.print(table)
    console.print(Text(f"\n{answer(demo)} {who_pays(demo)}\n"))
    for method in demo.methods:
        for finding in method.audit.findings:
            console.print(Text.assemble((method.label, "bold"), f": {finding.what} {finding.fix}"))
    for name, file in FILES.items():
        console.print(Text(f"{name:8} {out / file}"), soft_wrap=True)
