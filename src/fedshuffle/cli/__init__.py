"""The command line: each command parses its options, calls the library, and prints."""

import sys
from typing import Annotated

import typer

from fedshuffle import __version__
from fedshuffle.cli import advise, audit, compare, data, experiments, flower, methods, run, tune
from fedshuffle.cli.shared import Command, Group, say
from fedshuffle.errors import FedShuffleError

app = typer.Typer(
    help="Federated learning that optimises the objective you meant.",
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
about_methods = (audit.audit, methods.methods, methods.conformance, advise.advise)
training = (run.run, tune.tune, compare.compare, experiments.reproduce, experiments.demo, run.new)
for command in (*about_methods, *training):
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
