"""The command line: each command parses its options, calls the library, and prints."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fedshuffle import __version__
from fedshuffle.cli import advise, audit, data, flower, methods, run
from fedshuffle.cli.shared import Command, Group, say
from fedshuffle.errors import FedShuffleError

app = typer.Typer(
    help="Federated learning that optimises the objective you meant.",
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    *(audit.audit, run.run, advise.advise, methods.methods, methods.conformance),
    *(run.reproduce, run.compare, run.demo, run.new),
):
    app.command(cls=Command)(command)
app.add_typer(data.app, name="data")
app.add_typer(flower.app, name="flower")


def main() -> None:
    """Run the command; an error that the user can fix is one line, without a traceback."""
    try:
        app()
    except FedShuffleError as error:
        say("[bold red]error:[/]", error)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
