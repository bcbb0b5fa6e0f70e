"""An audit as a table for a person."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.verdict import BlackBoxAudit
from fedshuffle.auditing.weighed import Weighed
from fedshuffle.federation import Federation

_ROWS = 24
"""Federations up to this size are shown client by client."""


def print_audit(console: Console, audit: Weighed, federation: Federation) -> None:
    """Print who counts how much, the verdict, and what to change."""
    name, more = audit.title
    console.print(
        f"[bold]{escape(name)}[/]{more} on {len(federation)} clients, {escape(audit.setting)}",
        highlight=False,
    )
    console.print(_table(audit, federation))
    console.print(*_verdict(audit), sep="\n", highlight=False)
    if isinstance(audit, BlackBoxAudit):
        for fact in audit.facts():
            console.print(f"[dim]-[/] {escape(fact)}", highlight=False)
    for finding in audit.findings:
        console.print(f"\n[bold yellow]![/] {finding.what}", highlight=False)
        console.print(Padding(f"{finding.why}\n[green]Fix:[/] {finding.fix}", (0, 0, 0, 2)))


def _table(audit: Weighed, federation: Federation) -> Table:
    everyone = len(federation) <= _ROWS
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("client" if everyone else "clients", justify="right")
    table.add_column("examples", justify="right")
    table.add_column("takes part", justify="right")
    table.add_column("you meant", justify="right")
    table.add_column("really", justify="right")
    table.add_column("times too much", justify="left")
    for name, members in _groups(federation, everyone):
        meant = float(audit.objective_weights[members].sum())
        really = float(audit.effective_weights[members].sum())
        smallest, largest = federation.sizes[members].min(), federation.sizes[members].max()
        table.add_row(
            name,
            f"{smallest}" if smallest == largest else f"{smallest} to {largest}",
            f"{audit.inclusion_probabilities[members].mean():.3g}",
            f"{meant:.2%}",
            f"{really:.2%}{_margin(audit, members)}",
            _ratio(really / meant),
        )
    return table


def _margin(audit: Weighed, members: IntArray) -> str:
    """How far the interval of one client reaches, where it was estimated."""
    if not isinstance(audit, BlackBoxAudit) or audit.standard_errors is None or len(members) > 1:
        return ""
    low, high = audit.intervals[members[0]]
    return f" ± {(high - low) / 2:.2%}" if np.isfinite(high) else " ± ?"


def _groups(federation: Federation, everyone: bool) -> list[tuple[str, IntArray]]:
    """Every client alone, or ten groups from the smallest to the largest clients."""
    if everyone:
        return [(str(name), np.array([i])) for i, name in enumerate(federation.ids)]
    order = np.argsort(federation.sizes, kind="stable")
    return [(f"{len(part)}", part) for part in np.array_split(order, 10)]


def _ratio(ratio: float) -> str:
    """The ratio with a bar: right of the middle counts too much, left too little."""
    reach = round(min(8.0, 4 * abs(float(np.log2(ratio))))) if ratio > 0 else 8
    bar = ("#" * reach).rjust(8) + "|" + " " * 8 if ratio < 1 else " " * 8 + "|" + "#" * reach
    colour = "dim" if reach == 0 else ("red" if ratio > 1 else "blue")
    return f"{ratio:6.3f}  [{colour}]{bar}[/]"


def _verdict(audit: Weighed) -> list[str]:
    how = "exact" if audit.exact else "estimated"
    if audit.standard_errors is not None:
        how += f", standard error up to {_largest(audit.standard_errors):.1g}"
    lines = [f"\n[dim]{how} ({audit.how})[/]"]
    if audit.consistent:
        return [*lines, "[bold green]consistent[/]: it minimises the objective you meant."]
    if audit.consistent is None:
        return [*lines, "[bold]undecided[/]: no bias larger than the sampling error was seen."]
    return [
        *lines,
        f"[bold red]not consistent[/]: {audit.total_variation:.2%} of the objective is in the wrong"
        f" place; one client counts {audit.largest_ratio:.3g} times too much or too little"
        f" ({len(audit.gaining)} gain, {len(audit.losing)} lose).",
    ]


def _largest(errors: FloatArray) -> float:
    """The largest standard error among the clients of which anything is known."""
    return float(errors[np.isfinite(errors)].max(initial=0.0))
