"""The commands that run the experiments and the demo."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fedshuffle.cli.compare import run_comparison
from fedshuffle.cli.shared import AsJson, DataFolder, Jobs, Out, alone, console, emit, refuse_unused
from fedshuffle.errors import check_known, require, require_training


def _claims(module: str, name: str, out: Path, as_json: bool, **given: Any) -> None:
    """An experiment that holds claims against what it measures; it prints them itself."""
    experiment = import_module(f"fedshuffle.experiments.{module}")
    claims = experiment.reproduce(out, **given, progress=not as_json)
    if as_json:
        print(json.dumps([asdict(claim) for claim in claims]))


def _comparison(name: str, out: Path, as_json: bool, **given: Any) -> None:
    """One comparison, with its report."""
    from fedshuffle.experiments import real

    scale, data, jobs = given["scale"], given.get("data"), given.get("jobs")
    words = ["reproduce", name, "--scale", scale, "--out", str(out)]
    words += ["--data", str(data)] if data else []
    run_comparison(real.load(name, scale, out, data), out, jobs, words, as_json)


def _study(name: str, out: Path, as_json: bool, **given: Any) -> None:
    """Several comparisons, with tables of their own."""
    require("demo", f"fedshuffle reproduce {name}")
    study = import_module(f"fedshuffle.experiments.{name}")
    with alone(as_json):
        rows = study.reproduce(out, **given, progress=not as_json)
    emit(as_json, rows, partial(print, (out / "tables.md").read_text(encoding="utf-8"), end=""))


def _tuned(function: str, name: str, out: Path, as_json: bool, **given: Any) -> None:
    """What ``fedshuffle tune`` reaches."""
    from fedshuffle.experiments import step_sizes
    from fedshuffle.experiments.studies import csv_of

    with alone(as_json):
        rows = getattr(step_sizes, function)(out, **given, progress=not as_json)
    emit(as_json, rows, partial(print, csv_of(rows), end=""))


_OPTIONS = ("rounds", "scale", "data", "jobs")
_EXPERIMENTS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "quadratic": (partial(_claims, "quadratic"), ("rounds",)),
    "compression": (partial(_claims, "compression"), ("rounds",)),
    "theory": (partial(_claims, "theory.report"), ()),
    "shakespeare": (_comparison, ("scale", "data", "jobs")),
    "cifar100": (_comparison, ("scale", "data", "jobs")),
    "steps-shakespeare": (_comparison, ("scale", "data", "jobs")),
    "steps-cifar100": (_comparison, ("scale", "data", "jobs")),
    "steps-plays": (_comparison, ("scale", "data", "jobs")),
    "steps-default": (partial(_tuned, "reproduce_default"), ("data",)),
    "steps-held-out": (partial(_tuned, "reproduce_held_out"), ("scale", "jobs")),
    "availability": (_study, ("scale", "jobs")),
    "stragglers": (_study, ("scale", "jobs")),
}
"""What runs each experiment, and the options that it takes."""


def reproduce(
    context: typer.Context,
    experiment: Annotated[
        str,
        Argument(
            help="quadratic (the toy figures), compression, theory, shakespeare, cifar100;"
            " steps-shakespeare, steps-cifar100, steps-plays (both step sizes tuned), steps-default"
            " (what fedshuffle tune finds on the same data), steps-held-out (both, on generated"
            " data); availability (clients that come and go); stragglers (accuracy against time)."
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
    check_known("experiment", experiment, _EXPERIMENTS)
    run, takes = _EXPERIMENTS[experiment]
    refuse_unused(context, [name for name in _OPTIONS if name not in takes], experiment)
    given = {name: context.params[name] for name in takes}
    run(experiment, out, as_json, **{k: value for k, value in given.items() if value is not None})


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
