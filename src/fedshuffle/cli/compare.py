"""The command that compares methods."""

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from fedshuffle.cli.shared import (
    AsJson,
    ConfigOut,
    File,
    Jobs,
    Settings,
    Text,
    alone,
    check_one,
    check_out,
    console,
    emit,
    overrides,
)
from fedshuffle.errors import FedShuffleError, require

if TYPE_CHECKING:
    from fedshuffle.comparison import Comparison


def compare(
    config: Annotated[File, Argument(help="A TOML file of a run with a section compare.")] = None,
    resume: Annotated[File, Option(help="Resume the comparison in this folder.")] = None,
    out: ConfigOut = None,
    jobs: Jobs = None,
    scale: Annotated[Text, Option(help="Use the keys of the section scale.NAME.")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods over seeds, each at its best step size; the same command resumes it."""
    from fedshuffle import comparison

    check_one(config, resume)
    if config is not None:
        found = comparison.load(config, overrides(settings), scale)
        words = ["compare", str(config), *(["--scale", scale] if scale else [])]
        words += [word for text in settings or [] for word in ("--set", text)]
        words += ["--out", str(out)] if out else []
        run_comparison(found, check_out(out or found.base.out, config), jobs, words, as_json)
    elif resume is not None:
        if out is not None or scale is not None or settings:
            raise FedShuffleError("a comparison keeps its settings: --resume takes only --jobs.")
        if not (resume / "compare.toml").exists():
            raise FedShuffleError(f"{str(resume)!r} holds no comparison to resume.")
        run_comparison(comparison.load(resume / "compare.toml"), resume, jobs, [], as_json)


def run_comparison(
    found: "Comparison", out: Path, jobs: int | None, words: list[str], as_json: bool
) -> None:
    """Run a comparison, write its report with the command's words, and print its results."""
    require("report", "the report of a comparison")
    from fedshuffle.reports.comparison import write
    from fedshuffle.reports.comparison.tables import print_results, summary
    from fedshuffle.reports.comparison.warnings import annotate

    command = shlex.join(["fedshuffle", *words]) if words else None
    with alone(as_json):
        results = found.run(
            out, jobs=jobs, progress=not as_json, command=command, annotate=annotate
        )
    write(results, out)
    emit(as_json, summary(results, out), partial(print_results, console, results, out))
    if not results["complete"]:
        raise typer.Exit(1)
