"""The commands about one run: train it, and what the theory advises for it."""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedshuffle._terminal import Console
from fedshuffle.cli.shared import AsJson, alone, console
from fedshuffle.errors import FedShuffleError, user_error


def run(
    config: Annotated[Path | None, typer.Argument(help="A TOML file that describes a run.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder instead.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run, if not that of the config.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training in all.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="auto, lean, lanes or loop; lean:2 for two threads, lean:2:processes; ray:4."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to train: cpu, cuda or mps.")] = None,
    address: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of the Ray cluster, for engine ray; else one is started."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="All that is random follows from it.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another value for a key, such as work.batch_size=16."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train as a config file says, or go on with a run that was interrupted.

    A config runs the Python code that it names: run only those of people you trust. Ends with 1 if
    training diverged.
    """
    from fedshuffle import config as configs

    given = {"rounds": rounds, "engine": engine, "device": device, "seed": seed}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    changes |= dict(configs.setting(text) for text in settings or [])
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
                "a run goes on as it began: --resume takes only --rounds and --address."
            )
        with alone(as_json), _interruptible(resume):
            result = configs.resume(resume, progress=not as_json, address=address, **changes)
    else:
        raise FedShuffleError("give either a config file to run, or --resume and a run's folder.")
    from fedshuffle.report.run import print_run, summary

    if as_json:
        print(json.dumps(summary(result)))
    else:
        print_run(console, result, address)
    if result.diverged:
        raise typer.Exit(1)


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Let Ctrl-C end a run in peace; the run itself says how to go on once it has begun."""
    from fedshuffle.config import begun

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    except SystemExit as error:  # of a part of the user's: it must not pass for success
        raise FedShuffleError(f"{user_error(error)}.") from error
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one changes nothing any more
        if not begun(folder):
            print("Interrupted before the first round: nothing was saved.", file=sys.stderr)
        raise typer.Exit(130) from None


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning in one line, without the place in the code."""
    Console(stderr=True).print(
        f"[bold yellow]![/] {escape(str(message))}", highlight=False, soft_wrap=True
    )


def advise(
    config: Annotated[Path, typer.Argument(help="A TOML file that describes a run.")],
    clients: Annotated[int, typer.Option(help="Measure at most so many clients.")] = 50,
    points: Annotated[
        int, typer.Option(help="Measure at so many models: the start, and on the way.")
    ] = 2,
    target: Annotated[
        float, typer.Option(help="Predict rounds until this share of the start is left.")
    ] = 0.01,
    probe: Annotated[
        int, typer.Option(help="Rounds of each short run that tries a step size; 0 tries none.")
    ] = 10,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another value for a key, such as work.batch_size=16."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try step sizes in short runs, then say what the theory advises, each number with a source."""
    from fedshuffle import config as configs
    from fedshuffle.config.advising import advise as find_advice

    chosen = configs.load(config, dict(configs.setting(text) for text in settings or []))
    with alone(as_json):
        found = find_advice(
            chosen, clients=clients, points=points, target=target, probe=probe, progress=not as_json
        )
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    from fedshuffle.report.advice import print_advice

    print_advice(console, found)
