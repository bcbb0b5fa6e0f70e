"""The commands about Flower."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from typer import Option

from fedshuffle.cli.shared import Command, Group, console, overrides
from fedshuffle.errors import FedShuffleError, require

app = typer.Typer(
    help="Flower: real clients, on this machine for now.", no_args_is_help=True, cls=Group
)


@app.command(cls=Command)
def up(
    clients: Annotated[int, Option(help="How many SuperNodes to start.")] = 3,
    app_folder: Annotated[
        Path | None, Option("--app", metavar="DIR", help="Run this app, and end with its status.")
    ] = None,
    settings: Annotated[
        list[str] | None, Option("--set", help="With --app: other values, such as num-rounds=5.")
    ] = None,
    folder: Annotated[
        Path | None,
        Option(
            "--dir", help="Folder for keys and logs; else a temporary one, removed after success."
        ),
    ] = None,
    port: Annotated[int | None, Option(help="Of the SuperLink; else a free one.")] = None,
) -> None:
    """Bring up a SuperLink and SuperNodes on this machine only, with TLS and node keys."""
    require("flower", "fedshuffle flower")
    from fedshuffle.flower.local import COMPLETED, Deployment, app_config

    changes = overrides(settings)
    if app_folder is None and settings:
        raise FedShuffleError("--set changes nothing without --app: leave it out.")
    if app_folder is not None and "clients" in app_config(app_folder, changes):
        changes = {"clients": clients, **changes}
    with Deployment(clients, folder, port=port, progress=_say) as deployment:
        _say(f"logs in {deployment.logs}")
        if app_folder is None:
            with suppress(KeyboardInterrupt):  # from the moment on that it is promised
                command = deployment.command("DIR")
                _show(f"\nTo run an app here:\n\n    {command}\n\nCtrl-C ends it.\n")
                deployment.wait()
            _say("stopping")
            return
        status = deployment.run(app_folder, changes)
        _say(f"the run is {status}")
        if status != COMPLETED:
            raise typer.Exit(1)


def _say(line: str) -> None:
    console.print(f"[dim]·[/] {escape(line)}", soft_wrap=True)


def _show(text: str) -> None:
    print(text, end="", flush=True)
