"""The commands that run what the project brings: the paper's experiments, and the demo."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedshuffle.cli.compare import do
from fedshuffle.cli.shared import AsJson, Jobs, Out, console, refuse_unused
from fedshuffle.errors import unknown

if TYPE_CHECKING:
    from fedshuffle.experiments.quadratic import Claim

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
        str,
        typer.Argument(help="quadratic (the toy figures), theory, shakespeare or cifar100."),
    ],
    out: Out,
    rounds: Annotated[int, typer.Option(help="Rounds of training, for quadratic.")] = 1000,
    scale: Annotated[
        str, typer.Option(help="paper, laptop or smoke, for shakespeare and cifar100.")
    ] = "laptop",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of data sets; that of FEDSHUFFLE_DATA, or a cache, if none."),
    ] = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment of the paper; what was done before an interruption stays done."""
    if experiment not in _UNUSED:
        raise unknown("experiment", experiment, _UNUSED)
    refuse_unused(context, _UNUSED[experiment], experiment)
    if experiment == "quadratic":
        from fedshuffle.experiments.quadratic import reproduce as reproduce_quadratic

        _show_claims(reproduce_quadratic(out, rounds, progress=not as_json), as_json)
        return
    if experiment == "theory":
        from fedshuffle.experiments.theory import reproduce as reproduce_theory

        _show_claims(reproduce_theory(out, progress=not as_json), as_json)
        return
    from fedshuffle.experiments import real

    words = ["fedshuffle", "reproduce", experiment, "--scale", scale, "--out", str(out)]
    words += ["--data", str(data)] if data else []
    do(real.load(experiment, scale, out, data), out, jobs, shlex.join(words), as_json)


def _show_claims(claims: Sequence[Claim], as_json: bool) -> None:
    """The table of claims is printed with the progress; a program gets them here."""
    if as_json:
        print(json.dumps([asdict(claim) for claim in claims]))


def demo(
    out: Out = Path("fedshuffle-demo"),
    rounds: Annotated[int, typer.Option(help="Rounds of training.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the split and of the training.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Audit and train three methods on real data, and write a one-page report."""
    from fedshuffle.experiments.demo import demo as run_demo
    from fedshuffle.report.demo import print_summary

    summary = run_demo(out, rounds=rounds, seed=seed, progress=not as_json)
    if as_json:
        print(json.dumps(summary.to_dict()))
    else:
        print_summary(console, summary)
