"""The command that writes starter files."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import click
import typer

_KINDS = click.Choice(["run", "flower-app"])


def new(
    kind: Annotated[str, typer.Argument(click_type=_KINDS, help="What to write.")],
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new folder, which names a Flower app.")
    ],
) -> None:
    """Write starter files, ready to try: a run with a config, or an app of Flower."""
    from fedshuffle import templates

    if kind == "run":
        made, command = templates.new_run(folder), ["run", str(folder / "config.toml")]
        print(f"A run is in {made}: config.toml describes it, task.py has its model and data.")
    else:
        made = templates.new_flower_app(folder)
        command = ["flower", "up", "--clients", "3", "--app", str(folder)]
        print(f"A Flower app is in {made}. Its README says what to change.")
    print(f"To try it:\n\n    {shlex.join(['fedshuffle', *command])}")
