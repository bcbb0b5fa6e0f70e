"""The methods as a table for a person, with their consistency found by auditing them."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from fedshuffle import methods
from fedshuffle.auditing import audit
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork, MissLast
from fedshuffle.methods import Method

# Four clients on which every cause of a bias shows: batches of two make the steps (1, 1, 2, 3),
# which are not proportional to the sizes.
_CLIENTS = Federation.from_sizes([1, 2, 4, 5])
_CONDITIONS: dict[str, tuple[str, LocalWork]] = {
    "uneven_steps": ("full", LocalWork(batch_size=2)),
    "client_sampling": ("uniform:2", LocalWork(batch_size=2)),
    "unfinished_work": ("full", LocalWork(batch_size=2, interruption=MissLast())),
}


def describe(method: Method) -> dict[str, Any]:
    """Plain data about a method: its rules, and under which conditions it is consistent."""
    return {
        "name": method.name,
        "summary": method.summary,
        "reference": method.reference,
        **method.averaging.describe(),
        "momentum": method.momentum,
        "work": dict(method.work),
        "consistent": {name: _consistent(method, name) for name in _CONDITIONS},
    }


def _consistent(method: Method, condition: str) -> bool | None:
    """Whether the audit finds the method consistent; None where it is not defined."""
    sampling, work = _CONDITIONS[condition]
    try:
        return audit(_CLIENTS, method, sampling, work).consistent
    except FedShuffleError:
        return None


def print_methods(console: Console) -> None:
    """Print all methods, a line each."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("method", style="bold", no_wrap=True)
    for name in _CONDITIONS:
        table.add_column(name.replace("_", "\n"), justify="center")
    table.add_column("what it is", vertical="bottom")
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: "[dim]-[/]"}
    for method in methods.available():
        facts = describe(method)
        answers = [marks[answer] for answer in facts["consistent"].values()]
        table.add_row(method.name, *answers, method.summary)
    console.print(table)
    console.print(
        "\n[dim]yes: it minimises the objective you meant under that condition, by its audit."
        " Every method also takes --momentum mvr:A or global:A.[/]",
        highlight=False,
    )
