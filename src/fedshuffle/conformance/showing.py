"""The conformance suite on the command line."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedshuffle import methods
from fedshuffle._arrays import expect
from fedshuffle.conformance.report import Outcome, Report
from fedshuffle.methods import Method

_STYLES = {"passed": "[green]passed[/]", "failed": "[bold red]failed[/]", "skipped": "[dim]-[/]"}


def find(text: str) -> Method:
    """A method by its name, or by the import path of one's own, from the current folder."""
    if not methods.is_import_path(text):
        return methods.get(text)
    from fedshuffle.config import imports

    folder = Path.cwd()
    with imports.importable(folder):
        found = imports.find(text, folder)
    expect(found, Method, repr(text))
    assert isinstance(found, Method)
    return found


def print_report(console: Console, report: Report) -> None:
    """Print what the checks said, a line for each check; samplings that said the same together."""
    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left")
    table.add_column("check", style="bold", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("under, or why")
    for name, outcomes in _grouped(report).items():
        for kind in ("failed", "passed", "skipped"):
            for message, under in _by_message(outcomes, kind).items():
                words = [", ".join(under)] if any(under) else []
                words += [escape(message)] if message else []
                table.add_row(name, _STYLES[kind], ": ".join(words))
    console.print(table)
    number = {kind: sum(one.outcome == kind for one in report) for kind in _STYLES}
    console.print(
        f"\n{escape(report.subject)}: {number['passed']} passed, {number['failed']} failed,"
        f" {number['skipped']} do not apply.",
        highlight=False,
    )


def _grouped(report: Report) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for one in report:
        groups.setdefault(one.check.partition(" under ")[0], []).append(one)
    return groups


def _by_message(outcomes: list[Outcome], kind: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in outcomes:
        if one.outcome == kind:
            found.setdefault(one.message, []).append(one.check.partition(" under ")[2])
    return found
