"""The command that compares methods."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedshuffle._terminal import interrupted_once
from fedshuffle.cli.shared import AsJson, Jobs, Settings, alone, console, overrides
from fedshuffle.errors import FedShuffleError

if TYPE_CHECKING:
    from fedshuffle.comparison import Comparison


def compare(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file of a run with a section [compare].")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume that of this folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; by default that of the config.")] = None,
    jobs: Jobs = None,
    scale: Annotated[str | None, typer.Option(help="Use the keys of [scale.NAME].")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods over seeds, each at its best step size; the same command resumes it."""
    from fedshuffle import comparison

    if (config is None) == (resume is None):
        raise FedShuffleError("give either a file of a comparison, or --resume and its folder.")
    if resume is not None:
        if out is not None or scale is not None or settings:
            raise FedShuffleError("a comparison keeps its settings: --resume takes only --jobs.")
        if not (resume / "compare.toml").exists():
            raise FedShuffleError(f"{str(resume)!r} holds no comparison to resume.")
        run_comparison(comparison.load(resume / "compare.toml"), resume, jobs, None, as_json)
    elif config is not None:
        found = comparison.load(config, overrides(settings), scale)
        folder = out or found.base.out
        if folder is None:
            raise FedShuffleError(f"{config}: out is missing: add it, or give --out.")
        words = ["fedshuffle", "compare", str(config), *(["--scale", scale] if scale else [])]
        words += [word for text in settings or [] for word in ("--set", text)]
        words += ["--out", str(out)] if out else []
        run_comparison(found, folder, jobs, shlex.join(words), as_json)


def run_comparison(
    found: Comparison, out: Path, jobs: int | None, command: str | None, as_json: bool = False
) -> None:
    """Run a comparison, write its report, and print its results."""
    from fedshuffle.reports.comparison import write
    from fedshuffle.reports.comparison.tables import print_results, summary
    from fedshuffle.reports.comparison.warnings import annotate

    try:
        with interrupted_once(ends=True), alone(as_json):
            results = found.run(
                out, jobs=jobs, progress=not as_json, command=command, annotate=annotate
            )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    write(results, out)
    if as_json:
        print(json.dumps(summary(results, out)))
    else:
        print_results(console, results, out)
    if not results["complete"]:
        raise typer.Exit(1)
