"""The demo, and how it is told: its sentences, its page, and its summary on a terminal.

Each sentence follows from the numbers; none knows how the demo ends.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.text import Text

from fedshuffle._arrays import FloatArray, count
from fedshuffle._files import results_folder, write_file
from fedshuffle._terminal import plain_table, progress_bar
from fedshuffle.engines.cpu_tuning import one_thread
from fedshuffle.experiments.demo import experiment
from fedshuffle.experiments.demo.experiment import ALL, RARE, DemoResult, MethodResult
from fedshuffle.experiments.demo.figures import PICTURES, embedded, write_picture
from fedshuffle.randomness import check_seed
from fedshuffle.reports.page import joined, number, percent, render
from fedshuffle.reports.style import DARK, LIGHT

FILES = {"page": "report.html", "picture": "picture.png", "results": "results.json"}
"""What the demo writes."""
SAME = {True: "yes", False: "no", None: "cannot tell"}
"""Whether a method minimises the intended objective, by what the audit calls consistent."""


def demo(
    out: Path, *, rounds: int = experiment.ROUNDS, seed: int = 0, progress: bool = True
) -> DemoResult:
    """Audit and train three methods; write a report, a picture and the numbers to ``out``."""
    rounds, seed = count(rounds, "rounds"), check_seed(seed)
    out = results_folder(out)
    columns = (MofNCompleteColumn(), "rounds", TimeRemainingColumn())
    with one_thread(), progress_bar(progress, *columns) as bars:
        result = experiment.audit_and_train(rounds, seed, bars)
    write_picture(result, headline(result), out / FILES["picture"])
    write_file(out / FILES["page"], render_page(result, out))
    write_file(out / FILES["results"], json.dumps(result.to_dict(), indent=1) + "\n")
    return result


def headline(result: DemoResult) -> str:
    """How well the digits that mostly small clients hold are read."""
    worst, best = _furthest_apart(result)
    first, last = worst.rare.mean(), best.rare.mean()
    if first >= last or _within_spread(worst.rare, best.rare):
        found = f"no method reads them better than {worst.label} ({first:.0%})"
    else:
        found = f"{first:.0%} right with {worst.label}, {last:.0%} with {best.label}"
    return f"The digits of small clients: {found}"


def reason(result: DemoResult) -> str:
    """How much the small clients count, beside what was meant."""
    small, counts = result.digits.small, []
    for method in dict.fromkeys(_furthest_apart(result)):
        share = percent(method.audit.effective_weights[small].sum())
        counts.append(f"with {method.label} they count {share}")
    meant = percent(result.digits.federation.weights[small].sum())
    return f"You meant the small clients to count {meant}; {joined(counts)}."


def answer(result: DemoResult) -> str:
    """Who came closest to the optimum of the intended objective, and whether the audit knew."""
    first, *others = sorted(result.methods, key=lambda method: method.left.mean())
    gaps = []
    for method in others:
        ratio = method.left.mean() / first.left.mean()
        gaps.append(f"{ratio:.{1 if ratio < 10 else 0}f} times as much with {method.label}")
    text = (
        f"After {result.rounds} rounds {first.label} is closest to the optimum you meant:"
        f" {number(first.left.mean())} is left to gain, {joined(gaps)}."
    )
    alike = [method.label for method in others if _within_spread(first.left, method.left)]
    if alike:
        names = joined([first.label, *alike])
        text += f" Between {names} the gap is within the spread of the runs."
    if sorted(result.methods, key=lambda method: method.predicted) == [first, *others]:
        return f"{text} The audit had put them in this order, before any training."
    return f"{text} The audit had put them in another order: what is left is not bias alone."


def who_pays(result: DemoResult) -> str:
    """The method and the clients with the largest cost, and what it does to accuracy."""
    small = result.digits.small
    costs = {m: (m.excess_of(small), m.excess_of(~small)) for m in result.methods}
    worst = max(costs, key=lambda method: max(costs[method]))
    group = "small" if costs[worst][0] > costs[worst][1] else "large"
    of_small, of_large = (
        f"{number(abs(cost))} {'higher' if cost > 0 else 'lower'}" for cost in costs[worst]
    )
    lost = result.optimal_accuracies[RARE].mean() - worst.rare.mean()
    return (
        f"The highest price is paid under {worst.label}, by the {group} clients: the loss of small"
        f" clients is {of_small} than at the optimum you meant, that of large clients {of_large}."
        f" On the digits that mostly small clients hold ({joined(result.digits.rare_digits)}) its"
        f" test accuracy is {100 * abs(lost):.1f} points {'below' if lost > 0 else 'above'} that of"
        " the optimum."
    )


def _furthest_apart(result: DemoResult) -> tuple[MethodResult, MethodResult]:
    """The method that reads the digits of small clients worst, and the one nearest the optimum."""
    worst = min(result.methods, key=lambda method: method.rare.mean())
    return worst, min(result.methods, key=lambda method: method.left.mean())


def _within_spread(one: FloatArray, other: FloatArray) -> bool:
    """Whether means over runs differ by no more than their standard deviations together."""
    return bool(abs(one.mean() - other.mean()) <= one.std(ddof=1) + other.std(ddof=1))


def _mean_and_std(values: FloatArray) -> str:
    return f"{number(values.mean())} ± {number(values.std(ddof=1))}"


def render_page(result: DemoResult, out: Path) -> str:
    """The text of the page, which needs no other file."""
    command = ["fedshuffle", "demo", "--out", str(out), "--seed", str(result.seed)]
    command += ["--rounds", str(result.rounds)] if result.rounds != experiment.ROUNDS else []
    return render(
        "experiments/demo",
        "demo.html",
        {"mean_and_std": _mean_and_std},
        demo=result,
        digits=result.digits,
        settings=experiment,
        sentences={tell.__name__: tell(result) for tell in (headline, reason, answer, who_pays)},
        same=SAME,
        # each for light and for dark pages
        pictures={name: [embedded(name, result, t) for t in (LIGHT, DARK)] for name in PICTURES},
        night=DARK,
        command=shlex.join(command),
        files=FILES,
    )


def print_summary(console: Console, result: DemoResult, out: Path) -> None:
    """Print the demo on one screen."""
    table = plain_table(
        *("method", "wrong\nweight", "as\nmeant?", "error\npredicted", "error left\nmean ± std"),
        *("test\naccuracy", "digits of\nthe small"),
        align="lrlrrrr",
        no_wrap=True,
    )
    for method in result.methods:
        same = method.audit.consistent
        table.add_row(
            method.label,
            percent(method.audit.total_variation),
            Text(SAME[same], style={True: "green", False: "red", None: "yellow"}[same]),
            number(method.predicted),
            _mean_and_std(method.left),
            *(percent(method.accuracies[part].mean()) for part in (ALL, RARE)),
        )
    best = [percent(result.optimal_accuracies[part].mean()) for part in (ALL, RARE)]
    table.add_row("the optimum", "", "", "", "0", *best, style="dim")

    console.print(Text(headline(result), style="bold"))
    console.print(Text(f"{reason(result)}\n"))
    console.print(table)
    console.print(Text(f"\n{answer(result)} {who_pays(result)}\n"))
    for method in result.methods:
        for finding in method.audit.findings:
            console.print(Text.assemble((method.label, "bold"), f": {finding.what} {finding.fix}"))
    for name, file in FILES.items():
        console.print(Text(f"{name:8} {out / file}"), soft_wrap=True)
