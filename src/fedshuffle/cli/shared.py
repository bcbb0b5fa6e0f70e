"""What the commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshuffle._terminal import Console

console = Console()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
Out = Annotated[Path, typer.Option(help="Folder for the results; made if it does not exist.")]
Jobs = Annotated[
    int | None, typer.Option(help="Runs at once, each on one core; as many as cores if none.")
]
