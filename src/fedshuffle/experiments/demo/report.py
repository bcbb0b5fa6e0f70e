"""The demo, and how it is told: its sentences, its page, and its summary on a terminal.

Each sentence follows from the numbers; none knows how the demo ends.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure, FigureBase
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.text import Text

from fedshuffle._arrays import FloatArray, count
from fedshuffle._files import results_folder, write_file
from fedshuffle._terminal import plain_table, progress_bar
from fedshuffle.engines.cpu_tuning import one_thread
from fedshuffle.experiments.demo import experiment
from fedshuffle.experiments.demo.experiment import ALL, RARE, DemoResult, MethodResult
from fedshuffle.randomness import check_seed
from fedshuffle.reports import rendering
from fedshuffle.reports.rendering import DARK, LIGHT, Theme, joined, number, percent

FILES = {"page": "report.html", "picture": "picture.png", "results": "results.json"}
"""What the demo writes."""


def demo(
    out: Path, *, rounds: int = experiment.ROUNDS, seed: int = 0, progress: bool = True
) -> DemoResult:
    """Audit and train three methods; write a report, a picture and the numbers to ``out``."""
    rounds, seed = count(rounds, "rounds"), check_seed(seed)
    out = results_folder(out)
    columns = (MofNCompleteColumn(), "rounds", TimeRemainingColumn())
    with one_thread(), progress_bar(progress, *columns) as bars:
        result = experiment.audit_and_train(rounds, seed, bars)
    write_picture(result, out / FILES["picture"])
    write_file(out / FILES["page"], render_page(result, out))
    write_file(out / FILES["results"], json.dumps(result.to_dict(), indent=1) + "\n")
    return result


def headline(result: DemoResult) -> str:
    """What was seen on the digits that mostly small clients hold."""
    lowest, best = _furthest_apart(result)
    if best is None:
        seen = ", ".join(f"{m.label} {m.rare.mean():.0%}" for m in result.methods)
        return f"No clear difference on the small clients' digits: {seen} right"
    seen = f"{lowest.label} gets {lowest.rare.mean():.0%} of the small clients' digits right"
    seen += f", {best.label} {best.rare.mean():.0%}"
    other = f": {lowest.label} minimised another objective"
    return seen + other if _undercounted(result, lowest) else seen


def reason(result: DemoResult) -> str:
    """How much the small clients count, beside what was meant."""
    small, (lowest, best) = result.digits.small, _furthest_apart(result)
    shown = result.methods if best is None else (lowest, best)
    counts = ", ".join(f"{m.label} {percent(m.count_of(small))}" for m in shown)
    counts = counts.replace(" ", " gives them ", 1)
    meant = percent(result.digits.federation.weights[small].sum())
    text = f"you meant the small clients to count for {meant} of the objective; {counts}."
    if best is None or _undercounted(result, lowest):
        return text[:1].upper() + text[1:]
    return f"Bias alone does not explain it: {text}"


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


def _furthest_apart(result: DemoResult) -> tuple[MethodResult, MethodResult | None]:
    """The method that reads the digits of small clients worst, and the one that reads them best.

    Of those that read them best, within the spread of the runs, it is the one nearest the optimum;
    None if the worst is among them.
    """
    lowest = min(result.methods, key=lambda method: method.rare.mean())
    highest = max(result.methods, key=lambda method: method.rare.mean())
    alike = [m for m in result.methods if _within_spread(m.rare, highest.rare)]
    if lowest in alike:
        return lowest, None
    return lowest, min(alike, key=lambda method: method.left.mean())


def _undercounted(result: DemoResult, method: MethodResult) -> bool:
    """Whether bias explains what small clients lose: the method counts them less than was meant."""
    small = result.digits.small
    meant = float(result.digits.federation.weights[small].sum())
    return method.mostly_bias and method.count_of(small) < meant


def _within_spread(one: FloatArray, other: FloatArray) -> bool:
    """Whether means over runs differ by no more than their standard deviations together."""
    return bool(abs(one.mean() - other.mean()) <= one.std(ddof=1) + other.std(ddof=1))


def _mean_and_std(values: FloatArray) -> str:
    return f"{number(values.mean())} ± {number(values.std(ddof=1))}"


def render_page(result: DemoResult, out: Path) -> str:
    """The text of the page, which needs no other file."""
    command = ["fedshuffle", "demo", "--out", str(out), "--seed", str(result.seed)]
    command += ["--rounds", str(result.rounds)] if result.rounds != experiment.ROUNDS else []
    return rendering.render(
        "experiments/demo",
        "demo.html",
        {"mean_and_std": _mean_and_std},
        demo=result,
        digits=result.digits,
        settings=experiment,
        sentences={tell.__name__: tell(result) for tell in (headline, reason, answer, who_pays)},
        # each for light and for dark pages
        pictures={name: [embedded(name, result, t) for t in (LIGHT, DARK)] for name in PICTURES},
        night=DARK,
        command=shlex.join(command),
        files=FILES,
    )


def print_summary(console: Console, result: DemoResult, out: Path) -> None:
    """Print the demo on one screen: the numbers, then the message and where the page is."""
    table = plain_table(
        *("method", "wrong\nweight", "as\nmeant?", "error\npredicted", "error left\nmean ± std"),
        *("test\naccuracy", "digits of\nthe small"),
        align="lrlrrrr",
        no_wrap=True,
    )
    for method in result.methods:
        table.add_row(
            method.label,
            percent(method.audit.total_variation),
            "[green]yes[/]" if method.audit.consistent else "[red]no[/]",
            number(method.predicted),
            _mean_and_std(method.left),
            *(percent(method.accuracies[part].mean()) for part in (ALL, RARE)),
        )
    best = [percent(result.optimal_accuracies[part].mean()) for part in (ALL, RARE)]
    table.add_row("the optimum", "", "", "", "0", *best, style="dim")

    console.print(table)
    console.print(Text(f"\n{answer(result)} {who_pays(result)}\n"))
    for method in result.methods:
        for finding in method.audit.findings:
            console.print(Text.assemble((method.label, "bold"), f": {finding.what} {finding.fix}"))
    console.print(Text(f"\n{headline(result)}.", style="bold"))
    console.print(Text(f"{reason(result)}\n"))
    for name in ("results", "picture", "page"):  # the page last: it is what to open
        console.print(Text(f"{name:8} {out / FILES[name]}"), soft_wrap=True)


def draw_federation(figure: FigureBase, result: DemoResult, theme: Theme) -> None:
    """Sizes of the clients, and under each the digits it holds."""
    order = np.argsort(-result.digits.federation.sizes, kind="stable")
    sizes = result.digits.federation.sizes[order]
    mix = (result.digits.label_counts[order] / sizes[:, None]).T
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, 1])
    shades = np.where(result.digits.small[order], "#9db4c0", "#5c6b73")
    top.bar(np.arange(len(sizes)), sizes, color=shades, width=0.8)
    top.set_ylabel("examples")
    top.grid(axis="y")
    image = bottom.imshow(mix, aspect="auto", cmap=theme.greys, vmin=0, vmax=1, origin="lower")
    bottom.set_yticks(range(0, len(mix), 3))
    bottom.set(ylabel="digit", xlabel="client, from the largest to the smallest")
    bottom.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=bottom, pad=0.02, ticks=[0, 0.5, 1], label="share")
    bar.outline.set_visible(False)


def draw_weights(figure: FigureBase, result: DemoResult, theme: Theme) -> None:
    """The effective over the intended weight of each client."""
    ratios = np.stack([m.audit.ratios for m in result.methods])
    axes = _by_size(figure, result, theme, ratios, "counts … times what you meant")
    axes.axhline(1, color=theme.axis, linewidth=1, zorder=0.5)
    axes.set_yscale("log")
    _log_ticks(axes.yaxis, ratios)


def draw_payers(figure: FigureBase, result: DemoResult, theme: Theme) -> None:
    """Each client's loss beside its loss at the optimum."""
    losses = np.stack([m.excess.mean(axis=0) for m in result.methods])
    axes = _by_size(figure, result, theme, losses, "loss above that at the optimum")
    axes.axhline(0, color=theme.axis, linewidth=1, zorder=0.5)


def _by_size(
    figure: FigureBase, result: DemoResult, theme: Theme, values: FloatArray, what: str
) -> Axes:
    """A number of each method (row) and client, over the client's size."""
    axes, sizes = figure.subplots(), result.digits.federation.sizes
    for m, numbers in zip(result.methods, values, strict=True):
        axes.scatter(sizes, numbers, 25, theme.colour(m.name), label=m.label, alpha=0.75, lw=0)
    axes.set(xscale="log", xlabel="examples of the client", ylabel=what)
    _log_ticks(axes.xaxis, sizes)
    axes.legend(frameon=False)
    axes.grid(axis="y")
    return axes


def _log_ticks(axis: Axis, values: NDArray[Any]) -> None:
    ends = (values.min() / 1.5, values.max() * 1.5)
    rendering.set_ticks(axis, rendering.round_numbers(ends, (1, 2, 3, 5)))


def draw_training(figure: FigureBase, result: DemoResult, theme: Theme) -> None:
    """``f(x^r) - f*`` over the rounds, with the levels that the audit predicts."""
    axes = figure.subplots()
    for m in result.methods:
        shade, runs = theme.colour(m.name), m.suboptimality
        axes.fill_between(result.evaluated, runs.min(0), runs.max(0), color=shade, alpha=0.18, lw=0)
        axes.plot(result.evaluated, runs.mean(0), color=shade, lw=1.8, label=m.label)
        if m.predicted:
            axes.axhline(m.predicted, color=shade, ls=":", lw=1.6, label=f"{m.label}, predicted")
    axes.set(yscale="log", xlabel="round", ylabel="$f(x) - f^*$, what is left to gain")
    axes.legend(frameon=False, ncols=2, loc="upper right")
    axes.grid(axis="y")


PICTURES: dict[str, tuple[str, Callable[[FigureBase, DemoResult, Theme], None]]] = {
    "federation": ("Who holds what", draw_federation),
    "weights": ("How much each client counts (audit)", draw_weights),
    "training": ("What is left to gain (training)", draw_training),
    "payers": ("Who pays", draw_payers),
}
"""Title and drawing of each picture; the page shows them one by one, the PNG all together."""


def write_picture(result: DemoResult, path: Path) -> None:
    """All pictures on one sheet."""
    with matplotlib.rc_context(LIGHT.parameters):
        sheet = Figure(figsize=(12, 9), layout="constrained")
        sheet.suptitle(f"{headline(result)}\n", fontsize=13, fontweight="bold", linespacing=1.6)
        sheet.text(0.5, 0.955, reason(result), ha="center", va="top", fontsize=12)
        parts = np.ravel(np.asarray(sheet.subfigures(2, 2, wspace=0.04, hspace=0.04)))
        for part, (name, draw) in zip(parts, PICTURES.values(), strict=True):
            part.suptitle(name, fontsize="large")
            draw(part, result, LIGHT)
        write_file(path, rendering.encoded(sheet, "png", dpi=115))


def embedded(name: str, result: DemoResult, theme: Theme) -> str:
    """A picture as data URI, for a light or a dark page."""
    with matplotlib.rc_context(theme.parameters):
        figure = Figure(figsize=(5.6, 3.7), layout="constrained")
        PICTURES[name][1](figure, result, theme)
        return rendering.data_uri("image/svg+xml", rendering.encoded(figure, "svg"))
