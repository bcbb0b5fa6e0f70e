"""The commands that list methods and check one."""

import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

from fedshuffle._terminal import plain_table
from fedshuffle.cli.shared import AsJson, console, emit
from fedshuffle.errors import FedShuffleError

if TYPE_CHECKING:
    from fedshuffle.testing import Report

_OUTCOMES = {"failed": "[bold red]failed[/]", "passed": "[green]passed[/]", "skipped": "[dim]-[/]"}
_COLOURS = {True: "green", False: "red", None: "dim"}


def methods(as_json: AsJson = False) -> None:
    """List the methods: what each is and costs, its options, and when it is consistent."""
    from fedshuffle.reports.methods import everything

    rows = everything()
    emit(as_json, rows, partial(print_methods, console, rows))


def print_methods(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print all methods, family by family, two or three lines each."""
    from fedshuffle.methods import available
    from fedshuffle.reports.methods import MARKS, family, options_text

    titles = dict(family(method)[:2] for method in available())
    width = max(len(row["name"]) for row in rows) + 1
    lines = [
        f"[dim]{'':{width}}         vectors  keeps  consistent if[/]",
        f"[dim]{'method':{width}} msgs  down   up  state  all  some  cut[/]",
    ]
    for page, members in itertools.groupby(rows, key=lambda row: row["family"]):
        lines += ["", f"[bold underline]{titles[page]}[/]"]
        for row in members:
            down, up = row["costs"]["vectors_down"], row["costs"]["vectors_up"]
            marks = "".join(
                f"[{_COLOURS[found]}]{MARKS[found]:>{gap}}[/]"
                for found, gap in zip(row["consistent"].values(), (5, 6, 5), strict=True)
            )
            lines += [
                f"[bold]{escape(row['name'].ljust(width))}[/]{row['costs']['messages']:5g}"
                f"  {down:4g}  {up:3g}  {'yes' if row['client_state'] else 'no':>5}{marks}"
                f"  [dim]{escape(row['reference'])}[/]",
                f"    {escape(row['summary'])}",
            ]
            if row["options"]:
                lines.append(f"    [dim]options: {escape(options_text(row))}[/]")
    console.print("\n".join(lines), soft_wrap=True, highlight=False)
    console.print(
        "\n[dim]Messages (both ways) and vectors of the model's size are per client of the cohort"
        " and round. Consistent: the audit, on clients of unequal sizes, finds the objective you"
        " meant if all take part, if some do (two of four, uniformly), or if work is cut short"
        " (clients miss their last step); '-' means not defined there. Options follow the name:"
        " fedprox:mu=0.1. scaffold+fedshuffle is scaffold with fedshuffle's averaging. Methods"
        " without a direction of their own also take --momentum mvr:A or global:A.[/]"
    )


def conformance(
    method: Annotated[
        str | None, Argument(help="A name, or module:METHOD for one of your own.")
    ] = None,
    transform: Annotated[
        str | None, Option(help="Instead: a channel, or module:TRANSFORM for one of your own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that a method, or a transform, keeps its promises; exits with 1 if anything fails."""
    from fedshuffle.config import imports
    from fedshuffle.testing import check, check_transform

    here = Path.cwd()
    with imports.importable(here):
        if method is not None and transform is None:
            report = check(imports.method(method, here))
        elif transform is not None and method is None:
            report = check_transform(imports.transform(transform, here))
        else:
            raise FedShuffleError("give either a method, or --transform and a transform.")
    emit(as_json, [result._asdict() for result in report], partial(_print_report, report))
    if not report.passed:
        raise typer.Exit(1)


def _print_report(report: "Report") -> None:
    """Print each check; samplings with the same result share a line."""
    table = plain_table("check", "outcome", "under, or why")
    for column in table.columns[:2]:
        column.no_wrap = True
    together: dict[tuple[str, str, str], list[str]] = {}
    for result in report:
        name, _, under = result.check.partition(" under ")
        together.setdefault((name, result.outcome, result.message), []).append(under)
    for (name, outcome, message), samplings in together.items():
        words = [", ".join(samplings)] if any(samplings) else []
        words += [escape(message)] if message else []
        table.add_row(f"[bold]{name}[/]", _OUTCOMES[outcome], ": ".join(words))
    console.print(table)
    number = Counter(result.outcome for result in report)
    console.print(
        f"\n{escape(report.subject)}: {number['passed']} passed, {number['failed']} failed,"
        f" {number['skipped']} do not apply."
    )
