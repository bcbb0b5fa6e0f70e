"""The commands that run the paper's experiments and the demo."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedshuffle.cli.compare import run_comparison
from fedshuffle.cli.shared import AsJson, DataFolder, Jobs, Out, console, refuse_unused
from fedshuffle.errors import check_known

_UNUSED = {
    "quadratic": ["scale", "data", "jobs"],
    "theory": ["rounds", "scale", "data", "jobs"],
    "shakespeare": ["rounds"],
    "cifar100": ["rounds"],
}
"""The experiments, and the options that change nothing in each."""


def reproduce(
    context: typer.Context,
    experiment: Annotated[
        str, typer.Argument(help="quadratic (the toy figures), theory, shakespeare or cifar100.")
    ],
    out: Out,
    rounds: Annotated[int, typer.Option(help="Rounds of training, for quadratic.")] = 1000,
    scale: Annotated[
        str, typer.Option(help="paper, laptop or smoke, for shakespeare and cifar100.")
    ] = "laptop",
    data: DataFolder = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment of the paper; the same command resumes it after an interruption."""
    check_known("experiment", experiment, _UNUSED)
    refuse_unused(context, _UNUSED[experiment], experiment)
    if experiment in ("quadratic", "theory"):
        from fedshuffle.experiments import toy_figures
        from fedshuffle.experiments.theory import report as theory

        if experiment == "quadratic":
            claims = toy_figures.reproduce(out, rounds, progress=not as_json)
        else:
            claims = theory.reproduce(out, progress=not as_json)
        if as_json:  # else the table of claims is printed with the progress
            print(json.dumps([asdict(claim) for claim in claims]))
        return
    from fedshuffle.experiments import real

    words = ["fedshuffle", "reproduce", experiment, "--scale", scale, "--out", str(out)]
    words += ["--data", str(data)] if data else []
    run_comparison(real.load(experiment, scale, out, data), out, jobs, shlex.join(words), as_json)


def demo(
    out: Out = Path("fedshuffle-demo"),
    rounds: Annotated[int, typer.Option(help="Rounds of training.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the split and of the training.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Audit and train three methods on real data, and write a one-page report."""
    from fedshuffle.experiments.demo import report

    result = report.demo(out, rounds=rounds, seed=seed, progress=not as_json)
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        report.print_summary(console, result, out)
