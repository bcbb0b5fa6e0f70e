"""The command that finds the step sizes of a run."""

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from typer import Argument, Option

from fedshuffle._terminal import plain_table
from fedshuffle.cli.shared import AsJson, ConfigOut, Settings, alone, console, emit, overrides
from fedshuffle.tuning import DEFAULT_SHARE, JOURNAL

if TYPE_CHECKING:
    from fedshuffle.config.schema import Config
    from fedshuffle.tuning import TunedStepSizes

UNEVEN = 10.0
"""Step sizes of clients that differ by more than this factor call for trying a cap."""
LEAST = 1e-3
"""A smaller decrease of the training loss, as a share of it, is no more than rounding."""
SHARE = "Largest cost of tuning, as a share of the rounds of the run."


def tune(
    config: Annotated[Path, Argument(help="A TOML file that describes a run.")],
    share: Annotated[float, Option(help=SHARE)] = DEFAULT_SHARE,
    out: ConfigOut = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Find the step sizes of a run by short runs, at a bounded cost.

    Finished short runs are noted in tuning.jsonl, in the folder of the run: the same command
    repeats none of them.
    """
    from fedshuffle import config as configs

    chosen = configs.load(config, overrides(settings))
    folder = out or chosen.out
    try:
        with alone(as_json):
            found = chosen.tune(folder, share=share, progress=not as_json)
    except KeyboardInterrupt:
        say_interrupted(folder)
        raise
    lines = config_lines(chosen.tuned(found))
    changes = [word for text in settings or [] for word in ("--set", text)]
    changes += [word for key, value in lines.items() for word in ("--set", f"{key}={value}")]
    changes += ["--out", str(out)] if out else []
    command = shlex.join(["fedshuffle", "run", str(config), *changes])
    data = {**found.to_dict(), "config": lines, "command": command}
    emit(as_json, data, partial(_print_found, found, lines, command))


def say_interrupted(folder: Path | None) -> None:
    """Say what an interruption while tuning leaves behind."""
    said = "nothing was saved"
    if folder is None:
        said += ". With --out DIR, finished short runs are"
    elif (folder / JOURNAL).exists():
        said = "finished short runs are saved. To resume, repeat the command"
    print(f"Interrupted while tuning: {said}.", file=sys.stderr)


def config_lines(config: "Config") -> dict[str, str]:
    """The step sizes of a config, as they are written into its file."""
    return {name: _written(getattr(config, name)) for name in ("step_size", "server_step_size")}


def in_words(found: "TunedStepSizes") -> str:
    """What was found, what it cost, and what else to try, in one line."""
    products = [trial.step_size * trial.server_step_size for trial in found.tried]
    larger = ""
    if found.start - found.loss <= LEAST * abs(found.start):
        larger = (
            " They hardly lowered the training loss: give a larger step_size to start from, or"
            " check the model and the loss."
        )
    elif found.step_size * found.server_step_size >= max(products):
        larger = " The largest that were tried are the best: give a larger step_size to start from."
    partly = "" if found.complete else " The budget was spent before all neighbours were tried."
    scale = found.largest_scale
    uneven = ""
    if scale > UNEVEN:
        uneven = (
            f" A client with few local steps takes steps {scale:.3g} times as large: method"
            " fedshuffle-capped:rho=2 caps that, so try it, too."
        )
    return (
        f"Found step_size {found.step_size:g} and server_step_size {found.server_step_size:g} in"
        f" {len(found.tried)} short runs, which cost {found.share:.0%} of a run."
        f"{larger}{partly}{uneven}"
    )


def _print_found(found: "TunedStepSizes", lines: dict[str, str], command: str) -> None:
    table = plain_table("step_size", "server_step_size", "rounds", "training loss", align="rrrr")
    for trial in found.tried:
        loss = "diverged" if trial.loss is None else f"{trial.loss:.4g}"
        sizes = f"{trial.step_size:g}", f"{trial.server_step_size:g}"
        table.add_row(*sizes, str(trial.rounds), loss)
    console.print(table)
    written = "\n".join(f"  {name} = {value}" for name, value in lines.items())
    text = f"The loss was {found.start:.4g} before training. {in_words(found)}\nIn the config:\n"
    console.print(escape(f"{text}{written}\nTo train with them:\n  {command}"), soft_wrap=True)


def _written(size: Any) -> str:
    """A step size as the value of a key in a TOML file."""
    from fedshuffle import schedules
    from fedshuffle.config.schema import ScheduleSpec
    from fedshuffle.config.writer import plain, toml

    if not isinstance(size, ScheduleSpec):
        return repr(float(size))
    if text := schedules.text(size.name, size.arguments):
        return f'"{text}"'
    pairs = [" ".join(toml({key: value}).split()) for key, value in plain(size).items()]
    return "{" + ", ".join(pairs) + "}"
