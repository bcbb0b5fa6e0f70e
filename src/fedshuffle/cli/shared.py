"""Options and helpers that commands share, and hints for words that do not exist."""

import json
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from fedshuffle._terminal import Console, interrupted_once
from fedshuffle.errors import FedShuffleError, did_you_mean, missing_known, nearest_name, user_error

console = Console(highlight=False)

Text = str | None
File = Path | None
Count = int | None
ConfigOut = Annotated[File, typer.Option(help="Folder; by default that of the config.")]
Out = Annotated[Path, typer.Option(help="Folder for the results; made if it does not exist.")]
Jobs = Annotated[Count, typer.Option(help="Runs at once; by default one per core.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another value for a key, such as work.batch_size=16."),
]
DataFolder = Annotated[
    Path | None, typer.Option(help="Folder of data sets; by default FEDSHUFFLE_DATA, or a cache.")
]

AVAILABILITIES = (
    "Which clients are available: independent:0.9,0.5, markov:on=0.1,off=0.2, cyclic:24:0.5,"
    " groups:2:KIND, drifting:0.9:0.1, trace:FILE; +leaves:0.1, +drop."
)
PROBABILITIES = (
    "Estimate inclusion probabilities from who took part: estimate, estimate:fedau:50,"
    " estimate:ewma:0.05, estimate:bayes."
)

SCHEDULES = (
    "For whom the server waits: wait, deadline:60, deadline:60+partial, over:8of10, fedasync:a=0.5,"
    " fedbuff:K=10,C=100, queued:C=10, shuffled:C=10."
)
CLOCKS = (
    "How long clients take: fixed:0.1,0.4 seconds per step, lognormal:0.1:1, classes:0.7x0.1,0.3x1,"
    " table:FILE, rates:4,2; +jitter:exponential, +latency:0.2, +down:1e7, +up:1e6."
)


def overrides(settings: list[str] | None) -> dict[str, Any]:
    """The keys and values of ``--set``."""
    from fedshuffle.config import setting

    return dict(setting(text) for text in settings or [])


def alone(as_json: bool) -> AbstractContextManager[object]:
    """Within this context a user's module prints to the error stream, apart from JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def emit(as_json: bool, data: Any, print_text: Callable[[], None]) -> None:
    """Print a result: its data as JSON for a program, or else as text."""
    if as_json:
        print(json.dumps(data, allow_nan=False))
    else:
        print_text()


def say(mark: str, text: object) -> None:
    """Print one line on the error stream, with a mark before it."""
    Console(stderr=True, highlight=False).print(f"{mark} {escape(str(text))}", soft_wrap=True)


def was_given(context: click.Context, name: str) -> bool:
    """Whether an option is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_unused(context: typer.Context, names: list[str], under: str) -> None:
    """Refuse options that would change nothing, which would only mislead."""
    for name in names:
        if was_given(context, name):
            option = f"--{name.replace('_', '-')}"
            raise FedShuffleError(f"{option} changes nothing under {under}: leave it out.")


class Group(TyperGroup):
    """A group of commands, with hints for commands that do not exist."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first word names."""
        self.suggest_commands = False  # ours also knows the words of other libraries
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = did_you_mean(args[0], list(self.commands))
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx) from error


class Command(TyperCommand):
    """A command, with hints for options that do not exist and for keys of a config."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words after the command."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = self._hint(error.option_name.lstrip("-").replace("-", "_"))
            raise click.UsageError(f"No such option {error.option_name}.{hint}", ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error about an argument names the option."""
        try:
            with interrupted_once(ends=True), warnings.catch_warnings():
                warnings.showwarning = lambda message, *_, **__: say("[bold yellow]![/]", message)
                return super().invoke(ctx)
        except KeyboardInterrupt:  # whoever has saved something has said so
            raise typer.Exit(130) from None
        except SystemExit as error:  # by the user's code: it is not a success
            if isinstance(error.__context__, BrokenPipeError):  # by rich: as | head reads no more
                raise typer.Exit(141) from None
            raise FedShuffleError(f"{user_error(error)}.") from error
        except ModuleNotFoundError as error:
            if (known := missing_known(error, ctx.command_path)) is None:
                raise
            raise known from error
        except FedShuffleError as error:
            name, space, rest = str(error).partition(" ")
            for param in self.params:
                if param.name == name.rstrip(":") and was_given(ctx, param.name):
                    option = f"{param.opts[0]}{':' * name.endswith(':')}"
                    raise FedShuffleError(f"{option}{space}{rest}") from error
            raise

    def _hint(self, wanted: str) -> str:
        options = [o for param in self.params for o in param.opts if o.startswith("-")]
        known = {option.lstrip("-").replace("-", "_"): option for option in options}
        near = nearest_name(wanted, known)
        if "set" in known:
            from fedshuffle.config.loader import key_for

            key = key_for(wanted)
            if key is not None and (near is None or key.rpartition(".")[2] == wanted):
                return f" Write --set {key}=VALUE to change that key of the config."
        return "" if near is None else f" Did you mean {known[near]}?"


def check_one(config: Path | None, resume: Path | None) -> None:
    if (config is None) == (resume is None):
        raise FedShuffleError("give either a config file, or --resume and the folder to resume.")


def check_out(out: Path | None, config: Path) -> Path:
    if out is None:
        raise FedShuffleError(f"{config}: out is missing: add it, or give --out.")
    return out
