"""An audit as a table for a person."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from fedshuffle._arrays import IntArray
from fedshuffle.auditing import Audit
from fedshuffle.federation import Federation

_ROWS = 24
"""Federations up to this size are shown client by client."""


def print_audit(console: Console, audit: Audit, federation: Federation) -> None:
    """Print who counts how much, the verdict, and what to change."""
    momentum = "" if audit.method.momentum == "none" else f", momentum {audit.method.momentum}"
    console.print(
        f"[bold]{audit.method.name}[/]{momentum} on {len(federation)} clients,"
        f" sampling {audit.sampling!r}",
        highlight=False,
    )
    console.print(_table(audit, federation))
    console.print(*_verdict(audit), sep="\n", highlight=False)
    for finding in audit.findings:
        console.print(f"\n[bold yellow]![/] {finding.what}", highlight=False)
        console.print(Padding(f"{finding.why}\n[green]Fix:[/] {finding.fix}", (0, 0, 0, 2)))


def _table(audit: Audit, federation: Federation) -> Table:
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
            f"{really:.2%}",
            _ratio(really / meant),
        )
    return table


def _groups(federation: Federation, everyone: bool) -> list[tuple[str, IntArray]]:
    """Every client alone, or ten groups from the smallest to the largest clients."""
    if everyone:
        return [(str(name), np.array([i])) for i, name in enumerate(federation.ids)]
    order = np.argsort(federation.sizes, kind="stable")
    return [(f"{len(part)}", part) for part in np.array_split(order, 10)]


def _ratio(ratio: float) -> str:
    """The ratio with a bar: right of the middle counts too much, left too little."""
    reach = min(8, round(4 * abs(np.log2(ratio))))
    bar = ("#" * reach).rjust(8) + "|" + " " * 8 if ratio < 1 else " " * 8 + "|" + "#" * reach
    colour = "dim" if reach == 0 else ("red" if ratio > 1 else "blue")
    return f"{ratio:6.3f}  [{colour}]{bar}[/]"


def _verdict(audit: Audit) -> list[str]:
    how = "exact" if audit.exact else "estimated"
    if audit.standard_errors is not None:
        how += f", standard error up to {audit.standard_errors.max():.1g}"
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
