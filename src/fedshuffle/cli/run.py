"""The command that trains a run."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedshuffle._arrays import jsonable
from fedshuffle._terminal import interrupted_once
from fedshuffle.cli.shared import AsJson, Settings, alone, console, overrides, say
from fedshuffle.errors import FedShuffleError, user_error

if TYPE_CHECKING:
    from fedshuffle.training import Result


def run(
    config: Annotated[Path | None, typer.Argument(help="A TOML file that describes a run.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; by default that of the config.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training in all.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="auto, sequential, vectorized or reference; sequential:2 for two threads,"
            " sequential:2:processes; ray:4."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to train: cpu, cuda or mps.")] = None,
    address: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of the Ray cluster, for engine ray; else one is started."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train as a config file says, or resume a run.

    A config runs the Python code that it names: run only those of people you trust. Ends with 1 if
    training diverged.
    """
    from fedshuffle import config as configs

    given = {"rounds": rounds, "engine": engine, "device": device, "seed": seed}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    changes |= overrides(settings)
    if config is not None and resume is None:
        chosen = configs.load(config, changes)
        folder = out or chosen.out
        if folder is None:
            raise FedShuffleError(f"{config}: out is missing: add it, or give --out.")
        with alone(as_json), _interruptible(folder):
            result = chosen.run(folder, progress=not as_json, address=address)
    elif resume is not None and config is None:
        if out is not None or changes.keys() - {"rounds"}:
            raise FedShuffleError(
                "a run keeps its settings: --resume takes only --rounds and --address."
            )
        with alone(as_json), _interruptible(resume):
            result = configs.resume(resume, progress=not as_json, address=address, **changes)
    else:
        raise FedShuffleError("give either a config file to run, or --resume and a run's folder.")
    if as_json:
        print(json.dumps(_summary(result)))
    else:
        _print_run(result, address)
    if result.diverged:
        raise typer.Exit(1)


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Handle Ctrl-C; the run itself says how to resume it once it has begun."""
    from fedshuffle.training.run_folder import RunFolder

    try:
        with interrupted_once(ends=True), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: say("[bold yellow]![/]", message)
            yield
    except SystemExit as error:  # by the user's code: it is not a success
        raise FedShuffleError(f"{user_error(error)}.") from error
    except KeyboardInterrupt:
        if not RunFolder(folder).begun:
            print("Interrupted before the first round: nothing was saved.", file=sys.stderr)
        raise typer.Exit(130) from None


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


def _print_run(result: Result, address: str | None) -> None:
    """The final metrics, the files, and how to load the model and resume the run."""
    from fedshuffle.config.runner import command

    found = _summary(result)
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
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)
