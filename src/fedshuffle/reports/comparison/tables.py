"""The tables of a comparison: terminal, JSON, Markdown, LaTeX, and every curve as CSV."""

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedshuffle._terminal import Console
from fedshuffle.comparison.results import Results
from fedshuffle.reports.comparison.model import Compared, group_title, is_share, momentum_title
from fedshuffle.reports.comparison.searches import SIZES
from fedshuffle.reports.comparison.warnings import headlines, line_warnings, marks, notes

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "‡": r"$^\ddagger$",
    "§": r"$^\S$",
    "¶": r"$^\P$",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}

_INCOMPLETE = "The comparison is not complete: some of its runs are still to be made."


def heading(comparison: Compared, metric: str) -> str:
    """A metric in words, with its unit."""
    return comparison.title(metric) + (" (%)" if is_share(metric) else "")


def legend(comparison: Compared) -> str:
    """How to read the tables."""
    better = "higher" if comparison.results["higher_is_better"] else "lower"
    seeds = len(comparison.seeds)
    spread = f"mean ± standard deviation (n - 1) over {seeds} seeds" if seeds > 1 else "one seed"
    what = heading(comparison, comparison.metric)
    what = f"{what[:1].upper()}{what[1:]}"
    return f"{what} after {comparison.rounds} rounds, {spread}; {better} is better."


def ranks(comparison: Compared, best: str, near: str) -> str:
    """How the best methods are marked."""
    text = f" The best of a column is {best}"
    if len(comparison.seeds) > 1:
        text += f"; what is within a standard deviation of it, its own or the best one's, is {near}"
    return f"{text}."


def _table(
    comparison: Compared, group: str, escape: Callable[[str], str], best: str, near: str, gap: str
) -> tuple[list[str], list[list[str]]]:
    """The table of a group: its columns, and per method its label, and values and step sizes."""
    sizes = ["step size", "server"][: 1 + comparison.shows_server(group)]
    columns, rows = ["method"], []
    for momentum in comparison.momenta_of(group):
        columns += [escape(momentum_title(momentum)), *sizes]
    for method, lines in comparison.rows(group):
        rows.append([escape(method.label)])
        for line in lines:
            if line is None:
                rows[-1] += ["", *("" for _ in sizes)]
                continue
            around = best if line.best else near if line.near else "%s"
            signs = "".join(gap + escape(mark) for mark in marks(line))
            own = [line.steps, f"{line.server_step_size:g}"][: len(sizes)]
            rows[-1] += [around % escape(line.value) + signs, *own]
    return columns, rows


def markdown(comparison: Compared) -> str:
    """All tables, one per group."""
    lines = [f"# {_md(comparison.results['title'])}", ""]
    if not comparison.results["complete"]:
        lines += [f"**{_INCOMPLETE}**", ""]
    for title, texts in headlines(comparison):
        lines += [f"**{_md(title)}.**", "", *(f"- {_md(text)}" for text in texts), ""]
    lines += [_md(legend(comparison)) + ranks(comparison, "**bold**", "*in italics*"), ""]
    for group in comparison.groups:
        lines += [f"## {_md(group_title(group).capitalize())}", ""]
        columns, rows = _table(comparison, group, _md, "**%s**", "*%s*", " ")
        lines += [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", *(f"- {_md(note)}" for note in notes(comparison, group))]
        lines += [""] if lines[-1] else []
    return "\n".join(lines).rstrip() + "\n"


def _md(text: str) -> str:
    """Text that Markdown shows unchanged."""
    return re.sub(r"([\\`*_\[\]<>|~&#])", r"\\\1", " ".join(text.split()))


def latex(comparison: Compared) -> str:
    """All tables, one per group; they need the package booktabs."""
    lines = [r"% In the preamble: \usepackage{booktabs}"]
    if not comparison.results["complete"]:
        lines.append(f"% {_INCOMPLETE}")
    for group in comparison.groups:
        columns, rows = _table(comparison, group, _tex, r"\textbf{%s}", r"\underline{%s}", "")
        caption = f"{comparison.results['title']}, {group_title(group)}. {legend(comparison)}"
        lines += [
            "",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_tex(caption)}{ranks(comparison, 'bold', 'underlined')}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
            r"\toprule",
            rf"{' & '.join(columns)} \\",
            r"\midrule",
            *(rf"{' & '.join(row)} \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
            *(rf"\par\footnotesize {_tex(note)}" for note in notes(comparison, group)),
            r"\end{table}",
        ]
    return "\n".join([*lines, ""])


def _tex(text: str) -> str:
    """Text that LaTeX prints unchanged."""
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def csv_text(comparison: Compared) -> str:
    """One line per evaluation of each run; a metric is empty where it is not finite.

    The smallest clients (``small_decile``) are measured after the last round only.
    """
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    facts = ("group", "momentum", "method", "label", *SIZES, "warnings", "seed", "diverged")
    names = [*(axis.key for axis in comparison.axes), *comparison.metrics]
    runs = [run for line in comparison.lines for run in line.curve["runs"]]
    small = list(dict.fromkeys(name for run in runs for name in run["small_decile"]))
    writer.writerow([*facts, *names, *(f"{name}_small_decile" for name in small)])
    for line in comparison.lines:
        what: list[Any] = [line.group, line.momentum, line.method.name, line.method.label]
        what += [line.step_size, line.server_step_size, " ".join(line_warnings(line))]
        for run in line.curve["runs"]:
            lost = "true" if line.lost(run) else "false"
            for record in run["history"]:
                values = [record.get(name) for name in names]
                last = run["small_decile"] if record is run["history"][-1] else {}
                values += [last.get(name) for name in small]
                writer.writerow([*what, run["seed"], lost, *values])
    return written.getvalue()


# For the command line ---------------------------------------------------------------------------


def summary(results: Results, out: Path) -> dict[str, Any]:
    """The table as plain data."""
    comparison = Compared(results)
    keys = [
        *("momentum", "group", *SIZES, "finished", "diverged", "planned", "mean", "std"),
        *("best", "near", "client_steps", "edge", "server_edge", "hopeless", "trivial"),
    ]
    return {
        "complete": results["complete"],
        "metric": comparison.metric,
        "rounds": comparison.rounds,
        "warnings": [text for _, texts in headlines(comparison) for text in texts],
        "results": [
            {"method": line.method.name, **{key: getattr(line, key) for key in keys}}
            for line in comparison.lines
        ],
        "out": str(out),
        "report": str(out / "report.html"),
    }


def print_results(console: Console, results: Results, out: Path) -> None:
    """Print how every method ends, what is missing, and where the rest is."""
    comparison = Compared(results)

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), highlight=False, soft_wrap=True)

    for title, texts in headlines(comparison):
        say(f"! {title}.", "bold yellow")
        for text in texts:
            say(f"  - {text}")
    for group in comparison.groups:
        columns, rows = _table(comparison, group, escape, "[bold]%s[/]", "[underline]%s[/]", " ")
        what = f"{heading(comparison, comparison.metric)} after {comparison.rounds} rounds"
        say(f"{what}, {group_title(group)}", "italic")
        table = Table()
        for column in columns:
            side: Any = "left" if column == "method" else "right"
            table.add_column(column, justify=side, overflow="fold")  # names stay whole
        for row in rows:
            table.add_row(*row)
        console.print(table)
        for note in notes(comparison, group):
            say(note, "dim")
    say(f"Runs and results are in {out}.")
    say(f"The report: {out / 'report.html'}")
    if not results["complete"]:
        say(f"Some runs failed: see {out / 'workers.log'}. The same command tries again.")
