"""An audit for a person: as a table in the terminal or in a notebook, and as a picture."""

from __future__ import annotations

import html as markup
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from fedshuffle._terminal import html_table, plain_table
from fedshuffle.auditing.result import Audit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 24  # larger federations are shown in ten groups of clients instead of client by client
_COLOURS = {"consistent": "green", "not consistent": "red"}


def print_audit(console: Console, audit: Audit) -> None:
    """Print how much each client counts, the conclusion, and what to change."""
    about = f" on {len(audit.sizes)} clients, {audit.source}"
    console.print(f"[bold]{escape(audit.name)}[/]{escape(about)}", highlight=False)
    columns, rows = _table(audit)
    table = plain_table(*columns, align="rrrrr")
    for *cells, ratio in rows:
        table.add_row(*map(escape, cells), _bar(ratio))
    console.print(table)
    word, sentence = audit.conclusion
    style = f"bold {_COLOURS.get(word, '')}".strip()
    console.print(f"\n[dim]{_how(audit)}[/]", highlight=False)
    console.print(f"[{style}]{word}[/]: {escape(sentence)}", highlight=False)
    for fact in audit.properties.facts():
        console.print(f"[dim]-[/] {escape(fact)}", highlight=False)
    for finding in audit.findings:
        console.print(f"\n[bold yellow]![/] {escape(finding.what)}", highlight=False)
        text = f"{escape(finding.why)}\n[green]Fix:[/] {escape(finding.fix)}"
        console.print(Padding(text, (0, 0, 0, 2)))


def html(audit: Audit) -> str:
    """The same for a notebook, in the colours of its theme."""
    safe = markup.escape
    columns, rows = _table(audit)
    marks = [("▸" if ratio > 1 else "◂") * _length(ratio) for *_, ratio in rows]
    cells = [(*row[:-1], f"{row[-1]:.3f}", mark) for row, mark in zip(rows, marks, strict=True)]
    word, sentence = audit.conclusion
    items = [safe(fact) for fact in audit.properties.facts()]
    for finding in audit.findings:
        what, why, fix = map(safe, (finding.what, finding.why, finding.fix))
        items.append(f"<b>{what}</b> {why} <i>Fix:</i> {fix}")
    about = f"<b>{safe(audit.name)}</b> on {len(audit.sizes)} clients, {safe(audit.source)}"
    return (
        f"<div><p>{about}</p>{html_table((*columns, ''), cells)}"
        f"<p>{safe(_how(audit))}<br><b>{word}</b>: {safe(sentence)}</p>"
        f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul></div>"
    )


def plot(audit: Audit, axes: Axes | None = None) -> Axes:
    """How many times what was meant each client counts, against its examples."""
    if axes is None:
        from matplotlib import pyplot  # its figures are shown in notebooks

        axes = pyplot.subplots(layout="constrained")[1]
    errors, spread = audit.standard_errors, None
    if errors is not None:
        spread = np.where(np.isfinite(errors), errors, 0.0) / audit.objective_weights
    axes.errorbar(audit.sizes, audit.ratios, yerr=spread, fmt="o", color="#0072b2", alpha=0.7)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xscale("log")
    if (audit.ratios > 0).all():
        axes.set_yscale("log")
    axes.set_xlabel("examples of the client")
    axes.set_ylabel("really / meant (1 is right)")
    axes.set_title(f"{audit.name}: {audit.conclusion[0]}")
    return axes


_Row = tuple[str, str, str, str, str, float]


def _table(audit: Audit) -> tuple[tuple[str, ...], list[_Row]]:
    """The columns, and a row for every client, or for ten groups of clients by size."""
    each = len(audit.sizes) <= _ROWS
    order = np.argsort(audit.sizes, kind="stable")
    groups = np.split(np.arange(len(order)), len(order)) if each else np.array_split(order, 10)
    rows: list[_Row] = []
    for members in groups:
        first = members[0]
        small, large = audit.sizes[members].min(), audit.sizes[members].max()
        meant = float(audit.objective_weights[members].sum())
        really, margin = float(audit.effective_weights[members].sum()), ""
        if each and audit.intervals is not None and audit.standard_errors is not None:
            low, high = audit.intervals[first]
            margin = f" ± {(high - low) / 2:.2%}" if np.isfinite(high) else " ± ?"
        row = (
            str(audit.client_ids[first]) if each else f"{len(members)}",
            f"{small}" if small == large else f"{small} to {large}",
            f"{audit.inclusion_probabilities[members].mean():.3g}",
            f"{meant:.2%}",
            f"{really:.2%}{margin}",
            really / meant,
        )
        rows.append(row)
    name = "client" if each else "clients"
    return (name, "examples", "takes part", "you meant", "really", "really / meant"), rows


def _length(ratio: float) -> int:
    """The length of the bar of a ratio, from 0 to 8: four for every doubling or halving."""
    return round(min(8.0, 4 * abs(float(np.log2(ratio))))) if ratio > 0 else 8


def _bar(ratio: float) -> str:
    """The ratio with a bar: to the right for more than was meant, to the left for less."""
    length = _length(ratio)
    bar = f"{'#' * length:>8}|{'':8}" if ratio < 1 else f"{'':8}|{'#' * length}"
    colour = "dim" if length == 0 else ("red" if ratio > 1 else "blue")
    return f"{ratio:6.3f}  [{colour}]{bar}[/]"


def _how(audit: Audit) -> str:
    how, errors = "exact" if audit.exact else "estimated", audit.standard_errors
    if errors is not None:  # of the clients about which anything is known
        largest = float(errors[np.isfinite(errors)].max(initial=0.0))
        how += f", standard error up to {largest:.1g}"
    return f"{how} ({audit.how})"
