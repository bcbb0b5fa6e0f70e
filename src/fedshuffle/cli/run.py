"""The commands that train a run and write starter files."""

import shlex
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.markup import escape
from typer import Argument, Option

from fedshuffle._arrays import jsonable
from fedshuffle.cli.shared import (
    AVAILABILITIES,
    CLOCKS,
    PROBABILITIES,
    SCHEDULES,
    AsJson,
    ConfigOut,
    Count,
    Settings,
    Text,
    alone,
    check_one,
    check_out,
    console,
    emit,
    overrides,
)
from fedshuffle.cli.tune import SHARE, in_words, say_interrupted
from fedshuffle.errors import FedShuffleError, missing_package
from fedshuffle.tuning import DEFAULT_SHARE

if TYPE_CHECKING:
    from fedshuffle.config.schema import Config
    from fedshuffle.training import Result

_ENGINES = (
    "auto, sequential, vectorized or reference; sequential:2 for two threads,"
    " sequential:2:processes; ray:4."
)
_CHANNELS = "How updates are compressed: topk:0.01, randk:0.1, qsgd:4, sign, float16; +ef, +diana."
_STARTERS = click.Choice(["run", "flower-app"])


def run(
    config: Annotated[Path | None, Argument(help="A TOML file that describes a run.")] = None,
    resume: Annotated[Path | None, Option(help="Resume the run in this folder.")] = None,
    out: ConfigOut = None,
    rounds: Annotated[Count, Option(help="Rounds of training in all.")] = None,
    channel: Annotated[Text, Option(help=_CHANNELS)] = None,
    availability: Annotated[Text, Option(help=AVAILABILITIES)] = None,
    schedule: Annotated[Text, Option(help=SCHEDULES)] = None,
    clock: Annotated[Text, Option(help=CLOCKS)] = None,
    probabilities: Annotated[Text, Option(help=PROBABILITIES)] = None,
    engine: Annotated[Text, Option(help=_ENGINES)] = None,
    device: Annotated[Text, Option(help="Where to train: cpu, cuda or mps.")] = None,
    address: Annotated[Text, Option(help="HOST:PORT of a Ray cluster; else one starts.")] = None,
    seed: Annotated[Count, Option(help="Seed of everything random.")] = None,
    tune: Annotated[bool, Option("--tune", help="Find the step sizes first.")] = False,
    share: Annotated[float | None, Option(help=f"{SHARE} [default: {DEFAULT_SHARE}]")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train as a config file says, or resume a run.

    A config runs the Python code that it names: run only those of people you trust. Exits with 1 if
    training diverged.
    """
    from fedshuffle import config as configs
    from fedshuffle.training.run_folder import RunFolder

    given = {"rounds": rounds, "engine": engine, "device": device, "seed": seed}
    given |= {"channel": channel, "availability": availability, "probabilities": probabilities}
    given |= {"schedule": schedule, "clock": clock}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    changes |= overrides(settings)
    extra = dict[str, Any]()
    check_one(config, resume)
    if share is not None and not tune:
        raise FedShuffleError("--share is the cost of tuning: add --tune, or leave it out.")
    if config is not None:
        chosen = configs.load(config, changes)
        folder = check_out(out or chosen.out, config)
        start: Callable[..., Result] = partial(chosen.run, folder)
        if tune:
            most = DEFAULT_SHARE if share is None else share
            start = partial(_tuned_run, chosen, folder, most, extra)
    elif resume is not None:
        if out is not None or tune or changes.keys() - {"rounds"}:
            raise FedShuffleError(
                "a run keeps its settings: --resume takes only --rounds and --address."
            )
        folder, start = resume, partial(configs.resume, resume, **changes)
    try:
        with alone(as_json):
            result = start(progress=not as_json, address=address)
    except KeyboardInterrupt:  # a run that has begun says itself how to resume it
        if tune and not RunFolder(folder).begun:
            say_interrupted(folder)
        elif not RunFolder(folder).begun:
            print("Interrupted before the first round: nothing was saved.", file=sys.stderr)
        raise
    found = _summary(result) | extra
    emit(as_json, found, partial(_print_run, result, found, address))
    if result.diverged:
        raise typer.Exit(1)


def _tuned_run(
    config: "Config", folder: Path, share: float, extra: dict[str, Any], **options: Any
) -> "Result":
    """Find the step sizes of a config, add what was found to the output, and train with them."""
    from fedshuffle.config.runner import check_free
    from fedshuffle.tuning.step_sizes import check

    check(share, config.privacy)
    check_free(folder, options["address"])
    with config.importable():
        options["inputs"] = config.inputs()
        found = config.tune(folder, share=share, **options)
        extra["tuning"] = found.to_dict()
        if options["progress"]:
            console.print(in_words(found), soft_wrap=True)
        return config.tuned(found).run(folder, **options)


def _summary(result: "Result") -> dict[str, Any]:
    from fedshuffle.training.monitoring import metrics_of

    last, out = result.history[-1], Path(result.out or "")
    return {
        "rounds": last["round"],
        **({"time": last["time"]} if "time" in last else {}),
        "diverged": result.diverged,
        "stopped": result.stopped,
        "metrics": jsonable(metrics_of(last)),
        "worst_clients": [] if result.clients is None else result.clients.worst().to_dict(),
        "out": str(out),
        "model": str(out / "model.safetensors"),
    }


def _print_run(result: "Result", found: dict[str, Any], address: str | None) -> None:
    """The final metrics, the files, and how to load the model and resume the run."""
    from fedshuffle.config.runner import command

    out = Path(found["out"])
    time = f" in {found['time']:,.4g} simulated seconds" if "time" in found else ""
    lines = [f"{found['rounds']} rounds are done{time}."]
    lines += [f"Stopped early: {result.stopped}."] if result.stopped else []
    if result.diverged:
        lines = [f"Diverged: {result.diverged}. Lower the step size and begin again."]
    for name, value in found["metrics"].items():
        lines.append(f"  {name} " + ("is not finite" if value is None else f"{value:.4g}"))
    if (clients := result.clients) is not None and len(clients) > 1:
        metric, few = clients.ranking_metric, clients.worst(3)
        shown = ", ".join(f"{c} ({v:.4g})" for c, v in zip(few.clients, few.metrics[metric]))
        lines.append(f"Clients with the worst {metric}: {shown}. All are in {out / 'clients.csv'}.")
        lines += [f"  {note}" for note in clients.notes]
    lines += [
        f"Metrics, checkpoints and the config are in {out}. To load the model:",
        f"  model = fedshuffle.load_model({found['out']!r})",
    ]
    if not result.diverged and not result.stopped:
        again = command(out, address)
        lines += ["For more rounds:", f"  {again} --rounds {2 * found['rounds']}"]
    console.print(escape("\n".join(lines)), soft_wrap=True)


def new(
    kind: Annotated[str, Argument(click_type=_STARTERS, help="What to write.")],
    folder: Annotated[
        Path, Argument(metavar="DIR", help="A new folder; a Flower app gets its name.")
    ],
) -> None:
    """Write starter files, ready to try: a run with a config, or a Flower app."""
    from fedshuffle import templates

    if kind == "run":
        made, command = templates.new_run(folder), ["run", str(folder / "config.toml")]
        print(f"A run is in {made}: config.toml describes it, task.py has its model and data.")
    else:
        made = templates.new_flower_app(folder)
        command = ["flower", "up", "--clients", "3", "--app", str(folder)]
        print(f"A Flower app is in {made}. Its README says what to change.")
    if find_spec("sklearn") is None:
        print(missing_package("sklearn", "Its example data", "demo"))
    print(f"To try it:\n\n    {shlex.join(['fedshuffle', *command])}")
