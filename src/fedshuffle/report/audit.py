"""An audit for a person: as a table in the terminal or in a notebook, and as a picture."""

from __future__ import annotations

import html as markup
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.verdict import BlackBoxAudit
from fedshuffle.auditing.weighed import Weighed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS = 24
"""Federations up to this size are shown client by client."""

_COLUMNS = ("examples", "takes part", "you meant", "really", "really / meant")
_COLOURS = {"consistent": "green", "not consistent": "red"}
_MORE, _LESS = "#d55e00", "#0072b2"  # Okabe and Ito's orange and blue, legible on dark and light


class _Row(NamedTuple):
    """One client, or a group of them."""

    name: str
    cells: tuple[str, ...]
    ratio: float
    """How many times what was meant they count together."""


def print_audit(console: Console, audit: Weighed) -> None:
    """Print who counts how much, the verdict, and what to change."""
    console.print(_heading(audit, "[bold]", "[/]", escape), highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(_first_column(audit), justify="right")
    for column in _COLUMNS[:-1]:
        table.add_column(column, justify="right")
    table.add_column(_COLUMNS[-1], justify="left")
    for row in _rows(audit):
        table.add_row(escape(row.name), *row.cells, _bar(row.ratio))
    console.print(table)
    word, sentence = audit.conclusion
    style = f"bold {_COLOURS.get(word, '')}".strip()
    console.print(f"\n[dim]{_how(audit)}[/]", highlight=False)
    console.print(f"[{style}]{word}[/]: {escape(sentence)}", highlight=False)
    for fact in _facts(audit):
        console.print(f"[dim]-[/] {escape(fact)}", highlight=False)
    for finding in audit.findings:
        console.print(f"\n[bold yellow]![/] {escape(finding.what)}", highlight=False)
        text = f"{escape(finding.why)}\n[green]Fix:[/] {escape(finding.fix)}"
        console.print(Padding(text, (0, 0, 0, 2)))


def html(audit: Weighed) -> str:
    """The same for a notebook; colours are left to its theme, light or dark, but for the bars."""
    safe = markup.escape
    head = "".join(f"<th>{safe(column)}</th>" for column in (_first_column(audit), *_COLUMNS, ""))
    rows = "".join(
        f"<tr><th>{safe(row.name)}</th>"
        + "".join(f"<td>{safe(cell)}</td>" for cell in (*row.cells, f"{row.ratio:.3f}"))
        + f"<td>{_html_bar(row.ratio)}</td></tr>"
        for row in _rows(audit)
    )
    word, sentence = audit.conclusion
    facts = "".join(f"<li>{safe(fact)}</li>" for fact in _facts(audit))
    findings = "".join(
        f"<li><b>{safe(finding.what)}</b> {safe(finding.why)} <i>Fix:</i> {safe(finding.fix)}</li>"
        for finding in audit.findings
    )
    return (
        f"<div><p>{_heading(audit, '<b>', '</b>', safe)}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"<p>{safe(_how(audit))}<br><b>{word}</b>: {safe(sentence)}</p>"
        f"<ul>{facts}{findings}</ul></div>"
    )


def plot(audit: Weighed, axes: Axes | None = None) -> Axes:
    """How many times what was meant each client counts, against its examples."""
    if axes is None:
        from matplotlib import pyplot  # whose figures notebooks show

        axes = pyplot.subplots(layout="constrained")[1]
    errors = audit.standard_errors
    spread = None
    if errors is not None:
        spread = np.where(np.isfinite(errors), errors, 0.0) / audit.objective_weights
    axes.errorbar(audit.sizes, audit.ratios, yerr=spread, fmt="o", color=_LESS, alpha=0.7)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xscale("log")
    if (audit.ratios > 0).all():
        axes.set_yscale("log")
    axes.set_xlabel("examples of the client")
    axes.set_ylabel("really / meant (1 is right)")
    axes.set_title(f"{audit.title[0]}{audit.title[1]}: {audit.conclusion[0]}")
    return axes


def _heading(audit: Weighed, begin: str, end: str, safe: Callable[[str], str]) -> str:
    name, more = audit.title
    clients = f"{len(audit.sizes)} clients"
    return f"{begin}{safe(name)}{end}{safe(more)} on {clients}, {safe(audit.setting)}"


def _first_column(audit: Weighed) -> str:
    return "client" if len(audit.sizes) <= _ROWS else "clients"


def _rows(audit: Weighed) -> Iterator[_Row]:
    for name, members in _groups(audit):
        meant = float(audit.objective_weights[members].sum())
        really = float(audit.effective_weights[members].sum())
        smallest, largest = audit.sizes[members].min(), audit.sizes[members].max()
        cells = (
            f"{smallest}" if smallest == largest else f"{smallest} to {largest}",
            f"{audit.inclusion_probabilities[members].mean():.3g}",
            f"{meant:.2%}",
            f"{really:.2%}{_margin(audit, members)}",
        )
        yield _Row(name, cells, really / meant)


def _groups(audit: Weighed) -> list[tuple[str, IntArray]]:
    """Every client alone, or ten groups from the smallest to the largest clients."""
    if len(audit.sizes) <= _ROWS:
        return [(str(name), np.array([i])) for i, name in enumerate(audit.client_ids)]
    order = np.argsort(audit.sizes, kind="stable")
    return [(f"{len(part)}", part) for part in np.array_split(order, 10)]


def _margin(audit: Weighed, members: IntArray) -> str:
    """How far the interval of one client reaches, where it was estimated."""
    if not isinstance(audit, BlackBoxAudit) or audit.standard_errors is None or len(members) > 1:
        return ""
    low, high = audit.intervals[members[0]]
    return f" ± {(high - low) / 2:.2%}" if np.isfinite(high) else " ± ?"


def _reach(ratio: float) -> int:
    """How long the bar of a ratio is, from 0 to 8: four for every doubling or halving."""
    return round(min(8.0, 4 * abs(float(np.log2(ratio))))) if ratio > 0 else 8


def _bar(ratio: float) -> str:
    """The ratio with a bar: to the right for more than was meant, to the left for less."""
    reach = _reach(ratio)
    bar = ("#" * reach).rjust(8) + "|" + " " * 8 if ratio < 1 else " " * 8 + "|" + "#" * reach
    colour = "dim" if reach == 0 else ("red" if ratio > 1 else "blue")
    return f"{ratio:6.3f}  [{colour}]{bar}[/]"


def _html_bar(ratio: float) -> str:
    left, right = (0, _reach(ratio)) if ratio > 1 else (_reach(ratio), 0)
    box = "display:inline-block;height:.7em;"
    return (
        "<span style='white-space:nowrap'>"
        f"<span style='{box}width:{8 - left}ex'></span>"
        f"<span style='{box}width:{left}ex;background:{_LESS}'></span>"
        f"<span style='{box}width:1px;background:currentColor'></span>"
        f"<span style='{box}width:{right}ex;background:{_MORE}'></span>"
        f"<span style='{box}width:{8 - right}ex'></span></span>"
    )


def _how(audit: Weighed) -> str:
    how = "exact" if audit.exact else "estimated"
    if audit.standard_errors is not None:
        how += f", standard error up to {_largest(audit.standard_errors):.1g}"
    return f"{how} ({audit.how})"


def _facts(audit: Weighed) -> list[str]:
    return audit.facts() if isinstance(audit, BlackBoxAudit) else []


def _largest(errors: FloatArray) -> float:
    """The largest standard error among the clients of which anything is known."""
    return float(errors[np.isfinite(errors)].max(initial=0.0))
