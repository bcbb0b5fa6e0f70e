"""The commands that write something to begin with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Something to begin with, written into a folder.", no_args_is_help=True)


@app.command(name="flower-app")
def new_flower_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder; names the app.")],
) -> None:
    """Write a small Flower app: a model, data, a client and a server, ready to run."""
    from fedshuffle.flower.new_app import new_app

    made = new_app(folder)
    print(f"A Flower app is in {made}. Its README says what to change. To try it:\n")
    print(f"    fedshuffle flower up --clients 3 --app {shlex.quote(str(folder))}")
