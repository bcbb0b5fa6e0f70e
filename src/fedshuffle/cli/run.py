"""The commands that train: a run, a comparison, experiments, a demo; and starter files."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.markup import escape
from typer import Argument, Option

from fedshuffle._arrays import jsonable
from fedshuffle.cli.shared import (
    AsJson,
    DataFolder,
    Settings,
    alone,
    console,
    emit,
    overrides,
    refuse_unused,
)
from fedshuffle.errors import FedShuffleError, unknown

if TYPE_CHECKING:
    from fedshuffle.comparison import Comparison
    from fedshuffle.training import Result

_Text = str | None
_Path = Path | None
_Count = int | None
_ConfigOut = Annotated[Path | None, Option(help="Folder; by default that of the config.")]
_Out = Annotated[Path, Option(help="Folder for the results; made if it does not exist.")]
_Jobs = Annotated[_Count, Option(help="Runs at once; by default one per core.")]
_ENGINES = (
    "auto, sequential, vectorized or reference; sequential:2 for two threads,"
    " sequential:2:processes; ray:4."
)
_STARTERS = click.Choice(["run", "flower-app"])
_UNUSED = {
    "quadratic": ["scale", "data", "jobs"],
    "theory": ["rounds", "scale", "data", "jobs"],
    "shakespeare": ["rounds"],
    "cifar100": ["rounds"],
}
"""The experiments, and the options that change nothing in each."""


def run(
    config: Annotated[Path | None, Argument(help="A TOML file that describes a run.")] = None,
    resume: Annotated[Path | None, Option(help="Resume the run in this folder.")] = None,
    out: _ConfigOut = None,
    rounds: Annotated[_Count, Option(help="Rounds of training in all.")] = None,
    engine: Annotated[_Text, Option(help=_ENGINES)] = None,
    device: Annotated[_Text, Option(help="Where to train: cpu, cuda or mps.")] = None,
    address: Annotated[_Text, Option(help="HOST:PORT of a Ray cluster; else one starts.")] = None,
    seed: Annotated[_Count, Option(help="Seed of everything random.")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train as a config file says, or resume a run.

    A config runs the Python code that it names: run only those of people you trust. Ends with 1 if
    training diverged.
    """
    from fedshuffle import config as configs
    from fedshuffle.training.run_folder import RunFolder

    given = {"rounds": rounds, "engine": engine, "device": device, "seed": seed}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    changes |= overrides(settings)
    _check_one(config, resume)
    if config is not None:
        chosen = configs.load(config, changes)
        folder = _check_out(out or chosen.out, config)
        start = partial(chosen.run, folder)
    elif resume is not None:
        if out is not None or changes.keys() - {"rounds"}:
            raise FedShuffleError(
                "a run keeps its settings: --resume takes only --rounds and --address."
            )
        folder, start = resume, partial(configs.resume, resume, **changes)
    try:
        with alone(as_json):
            result = start(progress=not as_json, address=address)
    except KeyboardInterrupt:  # a run that has begun says itself how to resume it
        if not RunFolder(folder).begun:
            print("Interrupted before the first round: nothing was saved.", file=sys.stderr)
        raise
    found = _summary(result)
    emit(as_json, found, partial(_print_run, result, found, address))
    if result.diverged:
        raise typer.Exit(1)


def _check_one(config: Path | None, resume: Path | None) -> None:
    if (config is None) == (resume is None):
        raise FedShuffleError("give either a config file, or --resume and the folder to resume.")


def _check_out(out: Path | None, config: Path) -> Path:
    if out is None:
        raise FedShuffleError(f"{config}: out is missing: add it, or give --out.")
    return out


def _summary(result: Result) -> dict[str, Any]:
    from fedshuffle.training.monitoring import metrics_of

    last, out = result.history[-1], Path(result.out or "")
    return {
        "rounds": last["round"],
        "diverged": result.diverged,
        "metrics": jsonable(metrics_of(last)),
        "worst_clients": [] if result.clients is None else result.clients.worst().to_dict(),
        "out": str(out),
        "model": str(out / "model.safetensors"),
    }


def _print_run(result: Result, found: dict[str, Any], address: str | None) -> None:
    """The final metrics, the files, and how to load the model and resume the run."""
    from fedshuffle.config.runner import command

    out = Path(found["out"])
    lines = [f"{found['rounds']} rounds are done."]
    if result.diverged:
        lines = [f"Diverged: {result.diverged}. Lower the step size and begin again."]
    for name, value in found["metrics"].items():
        lines.append(f"  {name} " + ("is not finite" if value is None else f"{value:.4g}"))
    if (clients := result.clients) is not None and len(clients) > 1:
        metric, few = clients.ranking_metric, clients.worst(3)
        shown = ", ".join(f"{c} {v:.4g}" for c, v in zip(few.clients, few.metrics[metric]))
        lines.append(f"Clients with the worst {metric}: {shown}. All are in {out / 'clients.csv'}.")
        lines += [f"  {note}" for note in clients.notes]
    lines += [
        f"Metrics, checkpoints and the config are in {out}. To load the model:",
        f"  model = fedshuffle.load_model({found['out']!r})",
    ]
    if not result.diverged:
        again = command(out, address)
        lines += ["For more rounds:", f"  {again} --rounds {2 * found['rounds']}"]
    console.print(escape("\n".join(lines)), soft_wrap=True)


def compare(
    config: Annotated[
        _Path, Argument(help="A TOML file of a run with a section [compare].")
    ] = None,
    resume: Annotated[_Path, Option(help="Resume that of this folder.")] = None,
    out: _ConfigOut = None,
    jobs: _Jobs = None,
    scale: Annotated[_Text, Option(help="Use the keys of [scale.NAME].")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Compare methods over seeds, each at its best step size; the same command resumes it."""
    from fedshuffle import comparison

    _check_one(config, resume)
    if config is not None:
        found = comparison.load(config, overrides(settings), scale)
        words = ["compare", str(config), *(["--scale", scale] if scale else [])]
        words += [word for text in settings or [] for word in ("--set", text)]
        words += ["--out", str(out)] if out else []
        _run_comparison(found, _check_out(out or found.base.out, config), jobs, words, as_json)
    elif resume is not None:
        if out is not None or scale is not None or settings:
            raise FedShuffleError("a comparison keeps its settings: --resume takes only --jobs.")
        if not (resume / "compare.toml").exists():
            raise FedShuffleError(f"{str(resume)!r} holds no comparison to resume.")
        _run_comparison(comparison.load(resume / "compare.toml"), resume, jobs, [], as_json)


def _run_comparison(
    found: Comparison, out: Path, jobs: int | None, words: list[str], as_json: bool
) -> None:
    """Run a comparison, write its report with the command's words, and print its results."""
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


def reproduce(
    context: typer.Context,
    experiment: Annotated[
        str, Argument(help="quadratic (the toy figures), theory, shakespeare or cifar100.")
    ],
    out: _Out,
    rounds: Annotated[int, Option(help="Rounds of training, for quadratic.")] = 1000,
    scale: Annotated[str, Option(help="paper, laptop, smoke: shakespeare, cifar100.")] = "laptop",
    data: DataFolder = None,
    jobs: _Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment of the paper; the same command resumes it after an interruption."""
    if experiment not in _UNUSED:
        raise unknown("experiment", experiment, _UNUSED)
    refuse_unused(context, _UNUSED[experiment], experiment)
    if experiment in ("shakespeare", "cifar100"):
        from fedshuffle.experiments import real

        words = ["reproduce", experiment, "--scale", scale, "--out", str(out)]
        words += ["--data", str(data)] if data else []
        _run_comparison(real.load(experiment, scale, out, data), out, jobs, words, as_json)
        return
    if experiment == "quadratic":
        from fedshuffle.experiments import toy_figures

        claims = toy_figures.reproduce(out, rounds, progress=not as_json)
    else:
        from fedshuffle.experiments.theory import report as theory

        claims = theory.reproduce(out, progress=not as_json)
    if as_json:  # else the table of claims is printed with the progress
        print(json.dumps([asdict(claim) for claim in claims]))


def demo(
    out: _Out = Path("fedshuffle-demo"),
    rounds: Annotated[int, Option(help="Rounds of training.")] = 400,
    seed: Annotated[int, Option(help="Seed of the split and of the training.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Audit and train three methods on real data, and write a one-page report."""
    from fedshuffle.experiments.demo import report

    result = report.demo(out, rounds=rounds, seed=seed, progress=not as_json)
    emit(as_json, result.to_dict(), partial(report.print_summary, console, result, out))


def new(
    kind: Annotated[str, Argument(click_type=_STARTERS, help="What to write.")],
    folder: Annotated[Path, Argument(metavar="DIR", help="A new folder; it names a Flower app.")],
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
