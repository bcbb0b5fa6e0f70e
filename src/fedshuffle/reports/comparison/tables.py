"""The tables of a comparison: terminal, JSON, Markdown, LaTeX, and every curve as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedshuffle._terminal import Console
from fedshuffle.comparison.results import Results
from fedshuffle.reports.comparison.model import Compared
from fedshuffle.reports.comparison.text import group_title, is_share, momentum_title
from fedshuffle.reports.comparison.warnings import headlines, warnings

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
        text += f"; what is no further from it than its standard deviation is {near}"
    return f"{text}."


def notes(comparison: Compared, group: str) -> list[str]:
    """The marks explained, curve by curve."""
    found: list[str] = []
    lines = comparison.of(group)
    if any("to" in line.steps for line in lines):
        found.append(
            "A range of step sizes is that of the clients: those with fewer local steps take"
            " larger ones."
        )
    for line in lines:
        if line.diverged:
            rest = "; the mean is over the others, and is not ranked" if line.finished else ""
            found.append(f"† {line.title}: {line.diverged} of {line.planned} runs diverged{rest}.")
        if line.edge:
            found.append(f"§ {line.title}: the best step size is the {line.edge} tried.")
        if line.trivial:
            found.append(f"¶ {line.title}: no better than always predicting the most common class.")
        if line.missing:
            missing = f"{line.missing} of {line.planned} runs have not finished"
            found.append(f"‡ {line.title}: {missing}.")
    return found


def _rows(
    comparison: Compared, group: str, escape: Callable[[str], str], best: str, near: str, space: str
) -> list[list[str]]:
    """A row per method: its label, and for each momentum the value and the step size."""
    rows = []
    for method, lines in comparison.rows(group):
        row = [escape(method.label)]
        for line in lines:
            if line is None:
                row += ["", ""]
                continue
            around = best if line.best else near if line.near else "%s"
            marks = "".join(space + escape(sign) for sign in line.marks.split())
            row += [around % escape(line.value) + marks, line.steps]
        rows.append(row)
    return rows


def markdown(comparison: Compared) -> str:
    """All tables, one per group."""
    lines = [f"# {_md(comparison.results['title'])}", ""]
    if not comparison.results["complete"]:
        lines += [f"**{_INCOMPLETE}**", ""]
    for title, texts in headlines(comparison):
        lines += [f"**{_md(title)}.**", "", *(f"- {_md(text)}" for text in texts), ""]
    lines += [_md(legend(comparison)) + ranks(comparison, "**bold**", "*in italics*"), ""]
    for group in comparison.groups:
        momenta = [_md(momentum_title(momentum)) for momentum in comparison.momenta_of(group)]
        lines += [f"## {_md(group_title(group).capitalize())}", ""]
        heads = ["method", *(text for momentum in momenta for text in (momentum, "step size"))]
        lines += [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
        rows = _rows(comparison, group, _md, "**%s**", "*%s*", " ")
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", *(f"- {_md(note)}" for note in notes(comparison, group))]
        lines += [""] if lines[-1] else []
    return "\n".join(lines).rstrip() + "\n"


def _md(text: str) -> str:
    r"""Text that Markdown shows unchanged.

    >>> print(_md("a|b <i> *c*"))
    a\|b \<i\> \*c\*
    """
    return re.sub(r"([\\`*_\[\]<>|~&#])", r"\\\1", " ".join(text.split()))


def latex(comparison: Compared) -> str:
    """All tables, one per group; they need the package booktabs."""
    lines = ["% In the preamble: \\usepackage{booktabs}"]
    if not comparison.results["complete"]:
        lines.append(f"% {_INCOMPLETE}")
    for group in comparison.groups:
        momenta = [_tex(momentum_title(momentum)) for momentum in comparison.momenta_of(group)]
        heads = [f"\\multicolumn{{2}}{{c}}{{{momentum}}}" for momentum in momenta]
        rules = [f"\\cmidrule(lr){{{2 * k + 2}-{2 * k + 3}}}" for k in range(len(momenta))]
        below = ["mean & step size"] * len(momenta)  # the caption says of what
        caption = f"{comparison.results['title']}, {group_title(group)}. {legend(comparison)}"
        lines += [
            "",
            "\\begin{table}",
            "\\centering",
            f"\\caption{{{_tex(caption)}{ranks(comparison, 'bold', 'underlined')}}}",
            f"\\begin{{tabular}}{{l{'rr' * len(momenta)}}}",
            "\\toprule",
            f" & {' & '.join(heads)} \\\\",
            f"{' '.join(rules)}",
            f"method & {' & '.join(below)} \\\\",
            "\\midrule",
        ]
        rows = _rows(comparison, group, _tex, "\\textbf{%s}", "\\underline{%s}", "")
        lines += [f"{' & '.join(row)} \\\\" for row in rows]
        lines += ["\\bottomrule", "\\end{tabular}"]
        lines += [f"\\par\\footnotesize {_tex(note)}" for note in notes(comparison, group)]
        lines.append("\\end{table}")
    return "\n".join([*lines, ""])


def _tex(text: str) -> str:
    r"""Text that LaTeX prints unchanged.

    >>> print(_tex("50% of a_b ± 1"))
    50\% of a\_b $\pm$ 1
    """
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def csv_text(comparison: Compared) -> str:
    """One line per evaluation of each run; a metric is empty where it is not finite."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    facts = ("group", "momentum", "method", "label", "step_size", "warnings", "seed", "diverged")
    names = ["round", *comparison.metrics]
    writer.writerow([*facts, *names])
    cautions = warnings(comparison)
    for line in comparison.lines:
        what = [line.group, line.momentum, line.method.name, line.method.label]
        kinds = " ".join(warning.kind for warning in cautions if warning.line is line)
        for run in line.curve["runs"]:
            lost = "true" if line.lost(run) else "false"
            for record in run["history"]:
                values = [record.get(name) for name in names]
                writer.writerow([*what, line.curve["step_size"], kinds, run["seed"], lost, *values])
    return written.getvalue()


# For the command line ---------------------------------------------------------------------------


def summary(results: Results, out: Path) -> dict[str, Any]:
    """The table as plain data."""
    comparison = Compared(results)
    keys = ("finished", "diverged", "planned", "mean", "std", "best", "near")
    return {
        "complete": results["complete"],
        "metric": comparison.metric,
        "rounds": comparison.rounds,
        "warnings": [text for _, texts in headlines(comparison) for text in texts],
        "results": [
            {
                "method": line.method.name,
                "momentum": line.momentum,
                "group": line.group,
                "step_size": line.curve["step_size"],
                **{key: getattr(line, key) for key in keys},
                "client_steps": line.curve["client_step_sizes"],
                **{key: getattr(line, key) for key in ("edge", "hopeless", "trivial")},
            }
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
    unit = " in %" if is_share(comparison.metric) else ""
    what = f"{comparison.title(comparison.metric)}{unit} after {comparison.rounds} rounds"
    for group in comparison.groups:
        table = Table(title=f"{what}, {group_title(group)}", title_justify="left")
        table.add_column("method")
        for name in ("momentum", "step size", comparison.metric, "diverged"):
            table.add_column(name, justify="right")
        for momentum in comparison.momenta_of(group):
            for line in comparison.of(group, momentum):
                style = "bold" if line.best else ""
                value = Text(line.value + line.marks, style=style)
                lost = f"{line.diverged} of {line.planned}" if line.diverged else ""
                label = Text(line.method.label, style=style)
                table.add_row(label, momentum, line.steps, value, lost)
            table.add_section()
        console.print(table)
        for note in notes(comparison, group):
            say(note, "dim")
    say(f"Runs and results are in {out}.")
    say(f"The report: {out / 'report.html'}")
    if not results["complete"]:
        say(f"Some runs failed: see {out / 'workers.log'}. The same command tries again.")
