"""What the commands share."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import click
import typer

from fedshuffle._terminal import Console
from fedshuffle.errors import FedShuffleError

console = Console()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
Out = Annotated[Path, typer.Option(help="Folder for the results; made if it does not exist.")]
Jobs = Annotated[
    int | None, typer.Option(help="Runs at once, each on one core; as many as cores if none.")
]


def alone(as_json: bool) -> AbstractContextManager[object]:
    """Within this context, what a user's module prints does not get between lines of JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def was_given(context: click.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_unused(context: typer.Context, names: list[str], under: str) -> None:
    """Refuse options that would change nothing, so that nobody believes they had an effect."""
    for name in names:
        if was_given(context, name):
            option = f"--{name.replace('_', '-')}"
            raise FedShuffleError(f"{option} changes nothing under {under}: leave it out.")
