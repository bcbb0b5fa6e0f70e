"""The demo's page, and its summary on a terminal."""

from __future__ import annotations

import shlex

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedshuffle.experiments.demo import words
from fedshuffle.experiments.demo.experiment import ROUNDS, Results, Settings, Summary
from fedshuffle.experiments.demo.figures import PICTURES, embedded
from fedshuffle.reports.page import number, percent, render
from fedshuffle.reports.style import DARK, LIGHT


def render_page(settings: Settings, results: Results, summary: Summary) -> str:
    """The text of the page, which needs no other file."""
    sizes, small = (np.array(results["federation"][name]) for name in ("sizes", "small"))
    steps = -(-sizes // settings.batch_size)
    edge = {settings.step_sizes[0], settings.step_sizes[-1]}
    command = ["fedshuffle", "demo", "--out", str(summary.files.page.parent)]
    command += ["--seed", str(summary.seed)]
    command += ["--rounds", str(summary.rounds)] if summary.rounds != ROUNDS else []
    return render(
        "experiments/demo",
        "demo.html",
        {},
        summary=summary,
        settings=settings,
        # each for light and for dark pages
        pictures={name: [embedded(name, results, t) for t in (LIGHT, DARK)] for name in PICTURES},
        best=results["optimum"]["value"],
        examples=int(sizes.sum()),
        test_examples=results["federation"]["test_examples"],
        sizes=(int(sizes.min()), int(sizes.max())),
        steps=(int(steps.min()), int(steps.max())),
        small=int(small.sum()),
        large=int((~small).sum()),
        pilots=[
            (m["audit"]["method"], m["step_size"], zip(settings.step_sizes, m["pilots"].values()))
            for m in results["methods"]
        ],
        at_edge=[m.method for m in summary.methods if m.step_size in edge],
        night=DARK,
        order={m.method: k for k, m in enumerate(summary.methods)},
        words=words,
        pilot_seeds=settings.seeds()[0],
        run_seeds=settings.seeds()[1],
        command=shlex.join(command),
    )


def print_summary(console: Console, summary: Summary) -> None:
    """Print the demo on one screen."""
    audits = Table(title="The audit: which objective is minimised?", title_justify="left")
    audits.add_column("method")
    for heading in ("weight in the\nwrong place", "largest factor\nfor one client"):
        audits.add_column(heading, justify="right")
    audits.add_column("the one\nyou meant?")
    title = f"Training: {summary.rounds} rounds, {summary.runs} runs each"
    trained = Table(title=title, title_justify="left")
    trained.add_column("method")
    for heading in ("error\npredicted", "error left\nmean ± std", "test\naccuracy"):
        trained.add_column(heading, justify="right")
    for heading in ("digits of\nthe small", "other\ndigits"):
        trained.add_column(heading, justify="right")
    for method in summary.methods:
        style = {True: "green", False: "red", None: "yellow"}[method.consistent]
        same = Text(words.same_objective(method), style=style)
        wrong, largest = percent(method.total_variation), f"{method.largest_ratio:.2f}"
        audits.add_row(method.label, wrong, largest, same)
        accuracies = (method.accuracy, method.accuracy_rare, method.accuracy_other)
        trained.add_row(
            method.label,
            number(method.predicted),
            f"{number(method.reached.mean)} ± {number(method.reached.std)}",
            *(percent(accuracy.mean) for accuracy in accuracies),
        )
    best = (summary.best_accuracy, summary.best_accuracy_rare, summary.best_accuracy_other)
    trained.add_section()
    trained.add_row("the optimum", "0", "0", *map(percent, best))

    console.print(Text(words.headline(summary), style="bold"))
    console.print(Text(words.reason(summary)))
    console.print()
    console.print(audits)
    for method in summary.methods:
        for finding in method.findings:
            console.print(Text.assemble((method.label, "bold"), ": ", finding))
    console.print()
    console.print(trained)
    sentences = (words.objectives(summary), words.answer(summary), words.ranking(summary))
    console.print(Text(" ".join(sentences)))
    console.print()
    for name, path in vars(summary.files).items():
        console.print(Text(f"{name:8} {path}"), soft_wrap=True)
