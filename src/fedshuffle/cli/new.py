"""The commands that write starter files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedshuffle.cli.shared import Command, Group

app = typer.Typer(help="Write starter files into a folder.", no_args_is_help=True, cls=Group)


@app.command(cls=Command, name="run")
def new_run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
) -> None:
    """Write a small run: a config, a model and data, ready to train in seconds."""
    from fedshuffle import templates

    made = templates.new_run(folder)
    print(f"A run is in {made}: config.toml describes it, task.py has its model and data.")
    print(f"To try it:\n\n    fedshuffle run {shlex.quote(str(folder / 'config.toml'))}")


@app.command(cls=Command, name="flower-app")
def new_flower_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder; names the app.")],
) -> None:
    """Write a small Flower app: a model, data, a client and a server, ready to run."""
    from fedshuffle import templates

    made = templates.new_flower_app(folder)
    print(f"A Flower app is in {made}. Its README says what to change. To try it:\n")
    print(f"    fedshuffle flower up --clients 3 --app {shlex.quote(str(folder))}")
