"""The tables of a comparison: Markdown, LaTeX, and every curve as CSV."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from fedshuffle.reports.comparison.model import Cell, Compared
from fedshuffle.reports.comparison.text import group_title, is_share, momentum_title, spread_text
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

INCOMPLETE = "The comparison is not complete: some of its runs are still to be made."


def heading(comparison: Compared, metric: str) -> str:
    """A metric in words, with its unit."""
    return comparison.title(metric) + (" (%)" if is_share(metric) else "")


def mark(cell: Cell) -> str:
    """The marks of a cell; :func:`notes` explains them."""
    marks = {"†": cell.diverged > 0, "‡": cell.missing > 0, "§": cell.edge, "¶": cell.trivial}
    return "".join(f" {sign}" for sign, wanted in marks.items() if wanted)


def step_text(cell: Cell) -> str:
    """The step size, and the range of the clients' step sizes.

    >>> step_text(Cell(0.01, 1, 0, 1, None, None, client_steps=(0.01, 0.44)))
    '0.01 to 0.44'
    """
    size, (low, high) = cell.step_size, cell.client_steps or (cell.step_size, cell.step_size)
    if math.isclose(low, size):
        return f"{size:g}" if math.isclose(high, size) else f"{size:g} to {high:g}"
    return f"{size:g} ({low:g} to {high:g})"


def cell_text(cell: Cell, metric: str) -> str:
    """Mean and deviation, or why there is none."""
    if cell.mean is not None:
        return spread_text(cell.mean, cell.std, metric)
    return "diverged" if cell.diverged else "unfinished"


def legend(comparison: Compared) -> str:
    """How to read the tables."""
    better = "higher" if comparison.high(comparison.metric) else "lower"
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
    if any("to" in step_text(line.cell) for line in lines):
        found.append(
            "A range of step sizes is that of the clients: those with fewer local steps take"
            " larger ones."
        )
    for line in lines:
        who, cell = line.title, line.cell
        if cell.diverged:
            rest = "; the mean is over the others, and is not ranked" if cell.finished else ""
            found.append(f"† {who}: {cell.diverged} of {cell.planned} runs diverged{rest}.")
        if cell.edge:
            found.append(f"§ {who}: the best step size is the {cell.edge} tried.")
        if cell.trivial:
            found.append(f"¶ {who}: no better than always predicting the most common class.")
        if cell.missing:
            found.append(f"‡ {who}: {cell.missing} of {cell.planned} runs have not finished.")
    return found


def _rows(
    comparison: Compared, group: str, escape: Callable[[str], str], best: str, near: str, space: str
) -> Iterator[list[str]]:
    """A row per method: its label, and for each momentum the value and the step size."""
    for method in comparison.methods_of(group):
        row = [escape(method.label)]
        for momentum in comparison.momenta_of(group):
            cell = comparison.cell(group, momentum, method)
            if cell is None:
                row += ["", ""]
                continue
            around = best if cell.best else near if cell.near else "%s"
            value = around % escape(cell_text(cell, comparison.metric))
            marks = "".join(space + escape(sign) for sign in mark(cell).split())
            row += [value + marks, step_text(cell)]
        yield row


def markdown(comparison: Compared) -> str:
    """All tables, one per group."""
    lines = [f"# {_md(comparison.results['title'])}", ""]
    if not comparison.results["complete"]:
        lines += [f"**{INCOMPLETE}**", ""]
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
        lines.append(f"% {INCOMPLETE}")
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
    """One line per round of each run; a metric is empty where it was not evaluated."""
    written = io.StringIO()
    runs = [run for line in comparison.lines for run in line.data["runs"]]
    recorded = {name for run in runs for record in run["history"] for name in record}
    names = [*(n for n in ("steps", "seconds") if n in recorded), *comparison.metrics]
    writer = csv.writer(written, lineterminator="\n")
    keys = ("group", "momentum", "method", "label", "step_size")
    writer.writerow([*keys, "warnings", "seed", "diverged", "round", *names])
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for warning in warnings(comparison):
        place = (warning.group, warning.momentum, warning.method)
        kinds.setdefault(place, []).append(warning.kind)
    for line in comparison.lines:
        facts: list[Any] = [line.data[key] for key in keys]
        facts.append(" ".join(kinds.get((line.group, line.momentum, line.method.name), ())))
        for run in line.data["runs"]:
            diverged = "true" if comparison.diverged(run) else "false"
            for record in run["history"]:
                values = [record.get(name) for name in names]
                writer.writerow([*facts, run["seed"], diverged, record["round"], *values])
    return written.getvalue()
