"""The commands about methods: list them, and check one."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from fedshuffle._terminal import plain_table
from fedshuffle.cli.shared import AsJson, console

if TYPE_CHECKING:
    from fedshuffle.testing import Report

_STYLES = {"failed": "[bold red]failed[/]", "passed": "[green]passed[/]", "skipped": "[dim]-[/]"}


def list_methods(as_json: AsJson = False) -> None:
    """List the methods: what each is and costs, its options, and when it is consistent."""
    from fedshuffle.reports.methods import everything

    if as_json:
        print(json.dumps(everything()))
    else:
        print_methods(console)


def print_methods(console: Console) -> None:
    """Print all methods, family by family, two or three lines each."""
    from fedshuffle.methods import available
    from fedshuffle.reports.methods import everything, family, options_text

    rows = everything()
    titles = dict(family(method)[:2] for method in available())
    width = max(len(row["name"]) for row in rows) + 1
    console.print(Text(f"{'':{width}}         vectors  keeps  consistent if", "dim"))
    console.print(Text(f"{'method':{width}} msgs  down   up  state  all  some  cut", "dim"))
    for page, members in itertools.groupby(rows, key=lambda row: row["family"]):
        console.print()
        console.print(Text(titles[page], "bold underline"))
        for row in members:
            console.print(_line(row, width), soft_wrap=True)
            console.print(Text(f"    {row['summary']}"), soft_wrap=True)
            if row["options"]:
                console.print(Text(f"    options: {options_text(row)}", "dim"), soft_wrap=True)
    console.print(
        "\n[dim]Messages (both ways) and vectors of the model's size are per client of the cohort"
        " and round. Consistent: the audit, on clients of unequal sizes, finds the objective you"
        " meant if all take part, if some do (two of four, uniformly), or if work is cut short"
        " (clients miss their last step); '-' means not defined there. Options follow the name:"
        " fedprox:mu=0.1. scaffold+fedshuffle is scaffold with fedshuffle's averaging. Methods"
        " without a direction of their own also take --momentum mvr:A or global:A.[/]",
        highlight=False,
    )


def _line(row: dict[str, Any], width: int) -> Text:
    from fedshuffle.reports.methods import MARKS

    cost = row["costs"]
    line = Text(f"{row['name']:{width}}", "bold")
    numbers = f"{cost['messages']:5g}  {cost['vectors_down']:4g}  {cost['vectors_up']:3g}"
    line.append(f"{numbers}  {'yes' if row['client_state'] else 'no':>5}", "not bold")
    styles = {True: "green", False: "red", None: "dim"}
    for consistent, gap in zip(row["consistent"].values(), (5, 6, 5), strict=True):
        line.append(f"{MARKS[consistent]:>{gap}}", f"not bold {styles[consistent]}")
    return line.append(f"  {row['reference']}", "not bold dim")


def conformance(
    method: Annotated[str, typer.Argument(help="A name, or module:METHOD for one of your own.")],
    as_json: AsJson = False,
) -> None:
    """Check that a method does what every method must; ends with 1 if anything fails."""
    from fedshuffle.config import imports
    from fedshuffle.testing import check

    here = Path.cwd()
    with imports.importable(here):
        report = check(imports.method(method, here))
    if as_json:
        print(json.dumps([result._asdict() for result in report]))
    else:
        _print_report(report)
    if not report.passed:
        raise typer.Exit(1)


def _print_report(report: Report) -> None:
    """Print each check, failures first; samplings with the same result share a line."""
    table = plain_table("check", "outcome", "under, or why")
    for column in table.columns[:2]:
        column.no_wrap = True
    together: dict[tuple[str, str, str], list[str]] = {}
    for result in report:
        name, _, under = result.check.partition(" under ")
        together.setdefault((name, result.outcome, result.message), []).append(under)
    order = [*dict.fromkeys(name for name, _, _ in together), *_STYLES]
    for key in sorted(together, key=lambda key: (order.index(key[0]), order.index(key[1]))):
        (name, outcome, message), samplings = key, together[key]
        words = [", ".join(samplings)] if any(samplings) else []
        words += [escape(message)] if message else []
        table.add_row(f"[bold]{name}[/]", _STYLES[outcome], ": ".join(words))
    console.print(table)
    number = Counter(result.outcome for result in report)
    console.print(
        f"\n{escape(report.subject)}: {number['passed']} passed, {number['failed']} failed,"
        f" {number['skipped']} do not apply.",
        highlight=False,
    )
