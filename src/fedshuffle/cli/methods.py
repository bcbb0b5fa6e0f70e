"""The commands about methods: list them, and check one."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedshuffle.cli.shared import AsJson, console


def list_methods(as_json: AsJson = False) -> None:
    """List the methods: what each is and costs, its options, and when it is consistent."""
    from fedshuffle.report.methods import everything, print_methods

    if as_json:
        print(json.dumps(everything()))
    else:
        print_methods(console)


def conformance(
    method: Annotated[str, typer.Argument(help="A name, or module:METHOD for one of your own.")],
    as_json: AsJson = False,
) -> None:
    """Check that a method does what every method must; ends with 1 if anything fails."""
    from fedshuffle.conformance import check
    from fedshuffle.conformance.showing import find, print_report

    report = check(find(method))
    if as_json:
        print(json.dumps([outcome._asdict() for outcome in report]))
    else:
        print_report(console, report)
    if not report.passed:
        raise typer.Exit(1)
