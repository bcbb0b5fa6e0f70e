"""The commands that run the experiments and the demo."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from fedshuffle.cli.compare import run_comparison
from fedshuffle.cli.shared import AsJson, DataFolder, Jobs, Out, alone, console, emit, refuse_unused
from fedshuffle.errors import require, require_training, unknown

_UNUSED = {
    "quadratic": ["scale", "data", "jobs"],
    "compression": ["scale", "data", "jobs"],
    "theory": ["rounds", "scale", "data", "jobs"],
    "shakespeare": ["rounds"],
    "cifar100": ["rounds"],
    "steps-shakespeare": ["rounds"],
    "steps-cifar100": ["rounds"],
    "steps-plays": ["rounds"],
    "steps-default": ["rounds", "scale", "jobs"],
    "steps-held-out": ["rounds", "data"],
    "availability": ["rounds", "data"],
    "stragglers": ["rounds", "data"],
}
"""The experiments, and the options that change nothing in each."""


def reproduce(
    context: typer.Context,
    experiment: Annotated[
        str,
        Argument(
            help="quadratic (the toy figures), compression, theory, shakespeare, cifar100;"
            " steps-shakespeare, steps-cifar100, steps-plays (both step sizes tuned), steps-default"
            " (what fedshuffle tune finds on the same data), steps-held-out (both, on generated"
            " data); availability (clients that come and"
            " go); stragglers (accuracy against time)."
        ),
    ],
    out: Out,
    rounds: Annotated[
        int | None, Option(help="Rounds of training: quadratic (1000), compression (400).")
    ] = None,
    scale: Annotated[
        str, Option(help="laptop, smoke or, of shakespeare and cifar100, paper.")
    ] = "laptop",
    data: DataFolder = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Repeat an experiment of the research pages; the same command resumes it if interrupted."""
    if experiment not in _UNUSED:
        raise unknown("experiment", experiment, _UNUSED)
    refuse_unused(context, _UNUSED[experiment], experiment)
    if _UNUSED[experiment] == ["rounds"]:  # a comparison
        from fedshuffle.experiments import real

        words = ["reproduce", experiment, "--scale", scale, "--out", str(out)]
        words += ["--data", str(data)] if data else []
        run_comparison(real.load(experiment, scale, out, data), out, jobs, words, as_json)
        return
    if experiment in ("steps-default", "steps-held-out"):
        from fedshuffle.experiments import step_sizes
        from fedshuffle.experiments.studies import csv_of

        shown = not as_json
        with alone(as_json):
            if experiment == "steps-default":
                rows = step_sizes.reproduce_default(out, data, progress=shown)
            else:
                rows = step_sizes.reproduce_held_out(out, scale, jobs, shown)
        emit(as_json, rows, partial(print, csv_of(rows), end=""))
        return
    if experiment in ("availability", "stragglers"):
        require("demo", f"fedshuffle reproduce {experiment}")
        from fedshuffle.experiments import availability, stragglers

        study = availability if experiment == "availability" else stragglers
        with alone(as_json):
            rows = study.reproduce(out, scale, jobs, progress=not as_json)
        emit(as_json, rows, partial(print, (out / "tables.md").read_text(encoding="utf-8"), end=""))
        return
    given = {} if rounds is None else {"rounds": rounds}
    if experiment == "quadratic":
        from fedshuffle.experiments import quadratic

        claims = quadratic.reproduce(out, **given, progress=not as_json)
    elif experiment == "compression":
        from fedshuffle.experiments import compression

        claims = compression.reproduce(out, **given, progress=not as_json)
    else:
        from fedshuffle.experiments.theory import report as theory

        claims = theory.reproduce(out, progress=not as_json)
    if as_json:  # else the table of claims is printed with the progress
        print(json.dumps([asdict(claim) for claim in claims]))


def demo(
    out: Out = Path("fedshuffle-demo"),
    rounds: Annotated[int, Option(help="Rounds of training.")] = 400,
    seed: Annotated[int, Option(help="Seed of the split and of the training.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Audit and train three methods on real data, and write a one-page report."""
    require_training("fedshuffle demo")
    require("demo", "fedshuffle demo")
    from fedshuffle.experiments.demo import report

    result = report.demo(out, rounds=rounds, seed=seed, progress=not as_json)
    emit(as_json, result.to_dict(), partial(report.print_summary, console, result, out))
