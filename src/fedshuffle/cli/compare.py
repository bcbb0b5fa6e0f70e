"""The command that compares methods."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedshuffle.cli.shared import AsJson, Jobs, alone, console
from fedshuffle.errors import FedShuffleError

if TYPE_CHECKING:
    from fedshuffle.comparison import Comparison


def compare(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file of a run with a section [compare].")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the comparison in this folder instead.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the comparison, if not that of the config.")
    ] = None,
    jobs: Jobs = None,
    scale: Annotated[
        str | None, typer.Option(help="A section [scale.NAME] whose keys come first.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another value for a key, such as compare.seeds=[0,1]."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods over seeds, each at its best step size; again, it goes on where it was."""
    from fedshuffle import comparison
    from fedshuffle.config import setting

    if resume is not None and config is None:
        if out is not None or scale is not None or settings:
            raise FedShuffleError("a comparison goes on as it began: --resume takes only --jobs.")
        if not (resume / "compare.toml").exists():
            raise FedShuffleError(f"{str(resume)!r} holds no comparison to go on with.")
        do(comparison.load(resume / "compare.toml"), resume, jobs, None, as_json)
    elif config is not None and resume is None:
        found = comparison.load(config, dict(setting(text) for text in settings or []), scale)
        folder = out or found.base.out
        if folder is None:
            raise FedShuffleError(f"{config}: out is missing: add it, or give --out.")
        words = ["fedshuffle", "compare", str(config)]
        words += ["--scale", scale] if scale else []
        words += [word for text in settings or [] for word in ("--set", text)]
        words += ["--out", str(out)] if out else []
        do(found, folder, jobs, shlex.join(words), as_json)
    else:
        raise FedShuffleError(
            "give either a file of a comparison, or --resume and a comparison's folder."
        )


def do(
    found: Comparison, out: Path, jobs: int | None, command: str | None, as_json: bool = False
) -> None:
    """Do a comparison, and say what came of it."""
    from fedshuffle.comparison.showing import print_results, summary
    from fedshuffle.report.comparison import write

    try:
        with alone(as_json):
            results = found.run(out, jobs=jobs, progress=not as_json, command=command)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    report = write(results, out)
    if as_json:
        print(json.dumps(summary(results, report, out)))
    else:
        print_results(console, results, report, out)
    if not results["complete"]:
        raise typer.Exit(1)
