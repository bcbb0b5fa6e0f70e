"""The tables of a comparison: Markdown, LaTeX, and every curve as CSV."""

from __future__ import annotations

import csv
import io
import math
import re
from typing import Any

from fedshuffle.report.comparison_numbers import (
    Cell,
    Compared,
    group_title,
    is_share,
    momentum_title,
    spread_text,
)
from fedshuffle.report.comparison_warnings import headlines, warnings

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

_FACTS = ("steps", "seconds")
"""What of a round goes into the CSV besides its metrics, where it was recorded."""


def heading(comparison: Compared) -> str:
    """What the numbers are."""
    return metric_heading(comparison, comparison.metric)


def metric_heading(comparison: Compared, metric: str) -> str:
    """A metric in words, with its unit."""
    return comparison.title(metric) + (" (%)" if is_share(metric) else "")


def mark(cell: Cell) -> str:
    """The marks of a cell; :func:`notes` says what they stand for."""
    marks = {"†": cell.diverged > 0, "‡": cell.missing > 0, "§": cell.edge, "¶": cell.trivial}
    return "".join(f" {sign}" for sign, wanted in marks.items() if wanted)


def step_text(cell: Cell) -> str:
    """The step size, and up to which ones the clients take.

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
        return spread_text(cell, metric)
    return "diverged" if cell.diverged else "unfinished"


def legend(comparison: Compared) -> str:
    """How to read the tables."""
    better = "higher" if comparison.high(comparison.metric) else "lower"
    seeds = len(comparison.seeds)
    spread = f"mean ± standard deviation (n - 1) over {seeds} seeds" if seeds > 1 else "one seed"
    what = heading(comparison)
    return (
        f"{what[:1].upper()}{what[1:]} after {comparison.rounds} rounds, {spread}; {better} is"
        " better."
    )


def ranks(comparison: Compared, best: str, near: str) -> str:
    """How those who rank first are marked."""
    text = f" The best of a column is {best}"
    if len(comparison.seeds) > 1:
        text += f"; what is no further from it than its standard deviation is {near}"
    return f"{text}."


def notes(comparison: Compared, group: str) -> list[str]:
    """What the marks stand for, curve by curve."""
    found: list[str] = []
    columns = [comparison.cells(group, momentum) for momentum in comparison.momenta_of(group)]
    if any("to" in step_text(cell) for column in columns for cell in column.values()):
        found.append(
            "A range of step sizes is that of the clients: those with fewer local steps take"
            " larger ones."
        )
    for momentum in comparison.momenta_of(group):
        cells = comparison.cells(group, momentum)
        for method in comparison.methods_of(group):
            cell = cells.get(method.name)
            if cell is None:
                continue
            who = f"{method.label}, {momentum_title(momentum)}"
            if cell.diverged:
                rest = "; the mean is over the others, and is not ranked" if cell.finished else ""
                found.append(f"† {who}: {cell.diverged} of {cell.planned} runs diverged{rest}.")
            if cell.edge:
                found.append(f"§ {who}: the best step size is the {cell.edge} tried.")
            if cell.trivial:
                found.append(f"¶ {who}: no better than always predicting the commonest class.")
            if cell.missing:
                found.append(f"‡ {who}: {cell.missing} of {cell.planned} runs have not finished.")
    return found


def _rows(comparison: Compared, group: str) -> list[tuple[str, list[Cell | None]]]:
    columns = [comparison.cells(group, momentum) for momentum in comparison.momenta_of(group)]
    return [
        (method.label, [column.get(method.name) for column in columns])
        for method in comparison.methods_of(group)
    ]


# Markdown -------------------------------------------------------------------------------------


def markdown(comparison: Compared) -> str:
    """All tables, one for each group."""
    lines = [f"# {_md(comparison.results['title'])}", ""]
    if not comparison.results["complete"]:
        lines += ["**The comparison is not complete: some of its runs are yet to be made.**", ""]
    for title, texts in headlines(comparison):
        lines += [f"**{_md(title)}.**", "", *(f"- {_md(text)}" for text in texts), ""]
    lines += [_md(legend(comparison)) + ranks(comparison, "**bold**", "*in italics*"), ""]
    for group in comparison.groups:
        momenta = [_md(momentum_title(momentum)) for momentum in comparison.momenta_of(group)]
        lines += [f"## {_md(group_title(group).capitalize())}", ""]
        heads = ["method", *(text for momentum in momenta for text in (momentum, "step size"))]
        lines += [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
        for label, cells in _rows(comparison, group):
            texts = [text for cell in cells for text in _md_cell(cell, comparison.metric)]
            lines.append(f"| {' | '.join([_md(label), *texts])} |")
        lines += ["", *(f"- {_md(note)}" for note in notes(comparison, group))]
        lines += [""] if lines[-1] else []
    return "\n".join(lines).rstrip() + "\n"


def _md_cell(cell: Cell | None, metric: str) -> tuple[str, str]:
    if cell is None:
        return "", ""
    around = "**" if cell.best else "*" if cell.near else ""
    return f"{around}{cell_text(cell, metric)}{around}{mark(cell)}", step_text(cell)


def _md(text: str) -> str:
    r"""Text that Markdown leaves as it is.

    >>> print(_md("a|b <i> *c*"))
    a\|b \<i\> \*c\*
    """
    return re.sub(r"([\\`*_\[\]<>|~&#])", r"\\\1", " ".join(text.split()))


# LaTeX ----------------------------------------------------------------------------------------


def latex(comparison: Compared) -> str:
    """All tables, one for each group; they need the package booktabs."""
    lines = ["% In the preamble: \\usepackage{booktabs}"]
    if not comparison.results["complete"]:
        lines.append("% The comparison is not complete: some of its runs are yet to be made.")
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
        for label, cells in _rows(comparison, group):
            texts = [_tex_cell(cell, comparison.metric) for cell in cells]
            lines.append(f"{' & '.join([_tex(label), *texts])} \\\\")
        lines += ["\\bottomrule", "\\end{tabular}"]
        lines += [f"\\par\\footnotesize {_tex(note)}" for note in notes(comparison, group)]
        lines.append("\\end{table}")
    return "\n".join([*lines, ""])


def _tex_cell(cell: Cell | None, metric: str) -> str:
    if cell is None:
        return " & "
    around = "\\textbf{%s}" if cell.best else "\\underline{%s}" if cell.near else "%s"
    value = around % _tex(cell_text(cell, metric))
    return f"{value}{_tex(mark(cell).replace(' ', ''))} & {step_text(cell)}"


def _tex(text: str) -> str:
    r"""Text that LaTeX prints as it is.

    >>> print(_tex("50% of a_b ± 1"))
    50\% of a\_b $\pm$ 1
    """
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


# CSV ------------------------------------------------------------------------------------------


def csv_text(comparison: Compared) -> str:
    """One line for each round of each run; a metric is empty where it was not evaluated."""
    written = io.StringIO()
    runs = [run for curve in comparison.results["curves"] for run in curve["runs"]]
    known = {name for run in runs for record in run["history"] for name in record}
    names = [*(name for name in _FACTS if name in known), *comparison.metrics]
    writer = csv.writer(written, lineterminator="\n")
    keys = ("group", "momentum", "method", "label", "step_size")
    writer.writerow([*keys, "warnings", "seed", "diverged", "round", *names])
    told: dict[tuple[str, str, str], list[str]] = {}
    for caution in warnings(comparison):
        place = (caution.group, caution.momentum, caution.method)
        told.setdefault(place, []).append(caution.kind)
    for curve, name in zip(comparison.results["curves"], comparison.names, strict=True):
        kinds = " ".join(told.get((curve["group"], curve["momentum"], name), ()))
        for run in curve["runs"]:
            lost = "true" if comparison.diverged(run) else "false"
            for record in run["history"]:
                facts: list[Any] = [curve[key] for key in keys]
                facts += [kinds, run["seed"], lost, record["round"]]
                writer.writerow([*facts, *(record.get(name) for name in names)])
    return written.getvalue()
