"""The demo for a person: pictures, the page, and what the terminal shows.

Every sentence here is chosen by comparing numbers; none knows how the demo ends.
"""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import NullLocator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedshuffle.auditing import Audit
from fedshuffle.report.look import DARK, LIGHT, Theme, colour, label, on_dark

if TYPE_CHECKING:
    from fedshuffle.experiments.demo import MethodSummary, Outcome, Spread, Summary

_NEAR = 1.5
"""Levels within this factor of each other count as the same."""

# Numbers --------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Two digits that count, without an exponent where a person can do without.

    >>> number(0.000789), number(-0.25), number(0.0), number(3e-9)
    ('0.00079', '-0.25', '0', '3.0e-09')
    """
    if value != 0 and abs(value) < 1e-6:
        return f"{value:.1e}"
    return np.format_float_positional(value, precision=2, fractional=False, trim="-")


def percent(share: float) -> str:
    """A share in percent, with one decimal."""
    return f"{100 * share:.1f}%"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# Words ----------------------------------------------------------------------------------------


def audit_line(audits: Sequence[Audit]) -> str:
    """What the audit says of all methods, in one line."""
    parts = [f"{label(audit.method)} {percent(audit.total_variation)}" for audit in audits]
    return f"Audit, before any training: weight in the wrong place: {', '.join(parts)}."


def same_objective(method: MethodSummary) -> str:
    """Whether a method minimises the objective meant, in a word."""
    return {True: "yes", False: "no", None: "cannot tell"}[method.consistent]


def headline(summary: Summary) -> str:
    """The demo in one line: what becomes of the digits that mostly small clients hold."""
    if not summary.rare_digits:
        return "When clients differ in size, which objective does federated training minimise?"
    worst, best = furthest_apart(summary)
    first, last = worst.accuracy_rare, best.accuracy_rare
    if worst is best or first.mean >= last.mean or _within_spread(first, last):
        return (
            "The digits of small clients: no method reads them better than"
            f" {label(worst.method)} ({first.mean:.0%})"
        )
    return (
        f"The digits of small clients: {first.mean:.0%} right with {label(worst.method)},"
        f" {last.mean:.0%} with {label(best.method)}"
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
        return f"{text} With {label(best.method)} they count {percent(best.small_weight)}."
    return (
        f"{text} With {label(worst.method)} they count {percent(worst.small_weight)}, with"
        f" {label(best.method)} {percent(best.small_weight)}."
    )


def verdict(summary: Summary) -> str:
    """Which methods minimise the objective meant."""
    sentences = []
    for consistent, what in (
        (True, "the objective you meant"),
        (None, "the objective you meant, as far as the audit can tell"),
        (False, "another objective"),
    ):
        found = [method for method in summary.methods if method.consistent is consistent]
        if found:
            verb = "minimises" if len(found) == 1 else "minimise"
            sentences.append(f"{_and([label(m.method) for m in found])} {verb} {what}.")
        if found and consistent is False:
            shares = _and([percent(method.total_variation) for method in found])
            sentences.append(f"There, {shares} of the weight is in the wrong place.")
    return " ".join(sentences)


def answer(summary: Summary) -> str:
    """Who came closest to the optimum of the objective meant, and how far the others stayed."""
    first, *others = sorted(summary.methods, key=lambda method: method.reached.mean)
    gaps = [
        f"{_times(method.reached.mean / first.reached.mean)} times as much with"
        f" {label(method.method)}"
        for method in others
    ]
    text = (
        f"After {summary.rounds} rounds {label(first.method)} is closest to the optimum you meant:"
        f" {number(first.reached.mean)} is left to gain, {_and(gaps)}."
    )
    alike = [method for method in others if _within_spread(first.reached, method.reached)]
    if alike:
        names = _and([label(method.method) for method in [first, *alike]])
        text += f" Between {names} the gap is within the spread of the runs."
    return text


def _within_spread(one: Spread, other: Spread) -> bool:
    return abs(one.mean - other.mean) <= one.std + other.std


def foretold(summary: Summary) -> str:
    """Whether the audit had ranked the methods as training did."""
    reached = sorted(summary.methods, key=lambda method: method.reached.mean)
    predicted = sorted(summary.methods, key=lambda method: method.predicted)
    names = ", ".join(label(method.method) for method in predicted)
    if reached == predicted:
        return f"The audit had put them in this order, before any training: {names}."
    return (
        f"The audit had put them in another order ({names}): what is left after so many rounds is"
        " not bias alone."
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
    return (
        f"the loss of small clients is {_apart(method.excess_small)} than at the optimum you meant,"
        f" that of large clients {_apart(method.excess_large)}."
    )


def _apart(difference: float) -> str:
    return f"{number(abs(difference))} {'higher' if difference > 0 else 'lower'}"


def who_pays(summary: Summary) -> str:
    """The method and the clients with the largest cost, and what it does to accuracy."""
    worst = max(summary.methods, key=lambda method: max(method.excess_small, method.excess_large))
    group = "small" if worst.excess_small > worst.excess_large else "large"
    text = (
        f"The highest price is paid under {label(worst.method)}, by the {group} clients:"
        f" {pays(worst)}"
    )
    if summary.rare_digits:
        lost = summary.best_accuracy_rare - worst.accuracy_rare.mean
        digits = _and([str(digit) for digit in summary.rare_digits])
        text += (
            f" On the digits that mostly small clients hold ({digits}) its test accuracy is"
            f" {100 * abs(lost):.1f} points {'below' if lost > 0 else 'above'} that of the optimum."
        )
    return text


def early_and_late(summary: Summary) -> str:
    """Who leads when noise decides, and who when bias does."""
    early = min(summary.methods, key=lambda method: method.early.mean)
    late = min(summary.methods, key=lambda method: method.reached.mean)
    then = f"After {summary.early_round} rounds {label(early.method)} was closest"
    if early.method == late.method:
        return f"{then}, and after {summary.rounds} it still is."
    return f"{then}; after {summary.rounds} it is {label(late.method)}."


# Pictures -------------------------------------------------------------------------------------


def draw_federation(figure: FigureBase, outcome: Outcome, theme: Theme) -> None:
    """Sizes of the clients, and under each the digits it holds."""
    digits = outcome.digits
    order = np.argsort(-digits.federation.sizes, kind="stable")
    sizes = digits.federation.sizes[order]
    mix = (digits.label_counts[order] / sizes[:, None]).T
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, 1])
    shades = np.where(digits.small[order], "#9db4c0", "#5c6b73")
    top.bar(np.arange(len(sizes)), sizes, color=shades, width=0.8)
    top.set_ylabel("examples")
    top.grid(axis="y")
    image = bottom.imshow(mix, aspect="auto", cmap=theme.greys, vmin=0, vmax=1, origin="lower")
    bottom.set_yticks(range(0, len(mix), 3))
    bottom.set_ylabel("digit")
    bottom.set_xlabel("client, from the largest to the smallest")
    bottom.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=bottom, pad=0.02, ticks=[0, 0.5, 1], label="share")
    bar.outline.set_visible(False)


def draw_weights(figure: FigureBase, outcome: Outcome, theme: Theme) -> None:
    """How many times too much each client counts."""
    axes = figure.subplots()
    sizes = outcome.digits.federation.sizes
    axes.axhline(1, color=theme.axis, linewidth=1)
    for trial in outcome.trials:
        axes.plot(sizes, trial.audit.ratios, **_dots(trial.method, theme))
    axes.set(xscale="log", yscale="log", xlabel="examples of the client")
    axes.set_ylabel("counts … times what you meant")
    ratios = np.concatenate([trial.audit.ratios for trial in outcome.trials])
    _plain_ticks(axes, "x", sizes)
    _plain_ticks(axes, "y", ratios)
    axes.legend(frameon=False)
    axes.grid(axis="y")


def draw_training(figure: FigureBase, outcome: Outcome, theme: Theme) -> None:
    """``f(x^r) - f*`` over the rounds, with the levels that the audit predicts."""
    axes = figure.subplots()
    lowest = min(float(trial.suboptimality.min()) for trial in outcome.trials)
    # A level far below every curve would only squeeze the curves.
    bottom = max(min([t.predicted for t in outcome.trials if t.predicted] + [lowest]), lowest / 30)
    for trial in outcome.trials:
        shade, runs = theme.colour(trial.method), trial.suboptimality
        axes.fill_between(outcome.rounds, runs.min(0), runs.max(0), color=shade, alpha=0.18, lw=0)
        axes.plot(outcome.rounds, runs.mean(0), color=shade, lw=1.8, label=label(trial.method))
        if trial.predicted >= bottom:
            axes.axhline(trial.predicted, color=shade, linestyle=":", linewidth=1.6)
            below = runs[:, -1].mean() > trial.predicted  # on the side away from the curve
            axes.annotate(
                f"predicted for {label(trial.method)}",
                (outcome.rounds[-1], trial.predicted),
                xytext=(0, -5 if below else 5),
                textcoords="offset points",
                ha="right",
                va="top" if below else "bottom",
                color=shade,
                fontsize="small",
                bbox={"facecolor": theme.page, "alpha": 0.7, "linewidth": 0, "pad": 1},
            )
    axes.set_yscale("log")
    axes.set_ylim(bottom=bottom / 2.5)
    axes.set(xlabel="round", ylabel="$f(x) - f^*$, what is left to gain")
    axes.legend(frameon=False)
    axes.grid(axis="y")


def draw_payers(figure: FigureBase, outcome: Outcome, theme: Theme) -> None:
    """Each client's loss beside its loss at the optimum."""
    axes = figure.subplots()
    sizes = outcome.digits.federation.sizes
    axes.axhline(0, color=theme.axis, linewidth=1)
    for trial in outcome.trials:
        axes.plot(sizes, trial.excess.mean(0), **_dots(trial.method, theme))
    axes.set(xscale="log", xlabel="examples of the client")
    axes.set_ylabel("loss above that at the optimum")
    _plain_ticks(axes, "x", sizes)
    axes.legend(frameon=False)
    axes.grid(axis="y")


def _dots(method: str, theme: Theme) -> dict[str, Any]:
    return {
        "linestyle": "none",
        "marker": "o",
        "markersize": 5,
        "alpha": 0.75,
        "markeredgewidth": 0,
        "color": theme.colour(method),
        "label": label(method),
    }


def _plain_ticks(axes: Axes, which: str, values: Any) -> None:
    """1, 2, 3, 5, 10, ... on a logarithmic axis, as far as the values reach."""
    steps = [m * 10.0**k for k in range(-3, 7) for m in (1, 2, 3, 5)]
    low, high = float(np.min(values)), float(np.max(values))
    ticks = [t for t in steps if low / 1.5 <= t <= high * 1.5]
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(ticks, labels=[f"{t:g}" for t in ticks])
    axis.set_minor_locator(NullLocator())


Drawing = Callable[[FigureBase, "Outcome", Theme], None]

PICTURES: dict[str, tuple[str, Drawing]] = {
    "federation": ("Who holds what", draw_federation),
    "weights": ("How much each client counts (audit)", draw_weights),
    "training": ("What is left to gain (training)", draw_training),
    "payers": ("Who pays", draw_payers),
}
"""Title and drawing of each picture; the page shows them one by one, the PNG all together."""


def write_picture(outcome: Outcome, summary: Summary, path: Path) -> None:
    """All pictures on one sheet."""
    with matplotlib.rc_context(LIGHT.parameters):
        sheet = Figure(figsize=(12, 8.8), layout="constrained")
        sheet.suptitle(headline(summary), fontsize="x-large")
        parts = np.ravel(np.asarray(sheet.subfigures(2, 2, wspace=0.04, hspace=0.04)))
        for part, (title, draw) in zip(parts, PICTURES.values(), strict=True):
            part.suptitle(title, fontsize="large")
            draw(part, outcome, LIGHT)
        # No software version in the file: the same numbers give the same bytes.
        sheet.savefig(path, dpi=130, metadata={"Software": None})


def _data_uri(draw: Drawing, outcome: Outcome, theme: Theme) -> str:
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedshuffle", **theme.parameters}):
        figure = Figure(figsize=(5.6, 3.7), layout="constrained")
        draw(figure, outcome, theme)
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode("ascii")


# The page -------------------------------------------------------------------------------------


def write_page(outcome: Outcome, summary: Summary, path: Path) -> None:
    """The report: one file that needs no other."""
    pictures = {
        name: (_data_uri(draw, outcome, LIGHT), _data_uri(draw, outcome, DARK))
        for name, (_, draw) in PICTURES.items()
    }
    path.write_text(render_page(outcome, summary, pictures), encoding="utf-8")


def render_page(outcome: Outcome, summary: Summary, pictures: dict[str, tuple[str, str]]) -> str:
    """The text of the page, with each picture as two data URIs: for light and for dark."""
    environment = Environment(
        loader=PackageLoader("fedshuffle", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=number, percent=percent, label=label, colour=colour, joined=_and, on_dark=on_dark
    )
    settings, digits = outcome.settings, outcome.digits
    sizes, small = digits.federation.sizes, digits.small
    steps = -(-sizes // settings.batch_size)
    edge = {settings.step_sizes[0], settings.step_sizes[-1]}
    return environment.get_template("demo.html").render(
        summary=summary,
        settings=settings,
        pictures=pictures,
        best=outcome.best,
        examples=int(sizes.sum()),
        test_examples=len(digits.test_labels),
        sizes=(int(sizes.min()), int(sizes.max())),
        steps=(int(steps.min()), int(steps.max())),
        small=int(small.sum()),
        large=int((~small).sum()),
        pilots=[
            (trial.method, trial.step_size, list(zip(settings.step_sizes, trial.pilots.tolist())))
            for trial in outcome.trials
        ],
        at_edge=[m.method for m in summary.methods if m.step_size in edge],
        headline=headline(summary),
        reason=reason(summary),
        night=DARK,
        order={m.method: k for k, m in enumerate(summary.methods)},
        verdict=verdict(summary),
        answer=answer(summary),
        foretold=foretold(summary),
        who_pays=who_pays(summary),
        early_and_late=early_and_late(summary),
        same_objective=same_objective,
        settled=settled,
        pays=pays,
        pilot_seeds=settings.seeds()[0],
        run_seeds=settings.seeds()[1],
        command=_command(summary, usual_rounds=type(settings).rounds),
    )


def _command(summary: Summary, usual_rounds: int) -> str:
    words = ["fedshuffle", "demo", "--out", str(summary.files.page.parent)]
    words += ["--seed", str(summary.seed)]
    if summary.rounds != usual_rounds:
        words += ["--rounds", str(summary.rounds)]
    return shlex.join(words)


# The terminal ---------------------------------------------------------------------------------


def print_summary(console: Console, summary: Summary) -> None:
    """The demo on one screen."""
    audits = Table(title="The audit: which objective is minimised?", title_justify="left")
    audits.add_column("method")
    for heading in ("weight in the\nwrong place", "largest factor\nfor one client"):
        audits.add_column(heading, justify="right")
    audits.add_column("the one\nyou meant?")
    for method in summary.methods:
        style = {True: "green", False: "red", None: "yellow"}[method.consistent]
        audits.add_row(
            label(method.method),
            percent(method.total_variation),
            f"{method.largest_ratio:.2f}",
            Text(same_objective(method), style=style),
        )

    trained = Table(
        title=f"Training: {summary.rounds} rounds, {summary.runs} runs each", title_justify="left"
    )
    trained.add_column("method")
    for heading in (
        "error\npredicted",
        "error left\nmean ± std",
        "test\naccuracy",
        "digits of\nthe small",
        "other\ndigits",
    ):
        trained.add_column(heading, justify="right")
    for method in summary.methods:
        trained.add_row(
            label(method.method),
            number(method.predicted),
            f"{number(method.reached.mean)} ± {number(method.reached.std)}",
            percent(method.accuracy.mean),
            percent(method.accuracy_rare.mean),
            percent(method.accuracy_other.mean),
        )
    trained.add_section()
    trained.add_row(
        "the optimum",
        "0",
        "0",
        percent(summary.best_accuracy),
        percent(summary.best_accuracy_rare),
        percent(summary.best_accuracy_other),
    )

    console.print(Text(headline(summary), style="bold"))
    console.print(Text(reason(summary)))
    console.print()
    console.print(audits)
    for method in summary.methods:
        for finding in method.findings:
            console.print(Text.assemble((label(method.method), "bold"), ": ", finding))
    console.print()
    console.print(trained)
    console.print(Text(f"{verdict(summary)} {answer(summary)} {foretold(summary)}"))
    console.print()
    for name, path in vars(summary.files).items():
        console.print(Text(f"{name:8} {path}"), soft_wrap=True)
