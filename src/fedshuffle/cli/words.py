"""Commands and options that do not exist: say which were meant."""

from __future__ import annotations

from typing import Any, final

import click
from typer.core import TyperCommand, TyperGroup

from fedshuffle import _synonyms
from fedshuffle.cli.shared import was_given
from fedshuffle.errors import FedShuffleError


@final
class Group(TyperGroup):
    """Commands, with the words that people bring for them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first word names."""
        self.suggest_commands = False  # what is said here knows more words
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = _synonyms.hint(args[0], list(self.commands))
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx) from error


@final
class Command(TyperCommand):
    """A command, with the words that people bring for its options and for a config's keys."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words after the command."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            wanted = error.option_name.lstrip("-").replace("-", "_")
            hint = _option(wanted, self.params)
            raise click.UsageError(f"No such option {error.option_name}.{hint}", ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Do the command; an error about an option calls it as the command line does."""
        try:
            return super().invoke(ctx)
        except FedShuffleError as error:
            name, space, rest = str(error).partition(" ")
            for param in self.params:
                if param.name == name.rstrip(":") and was_given(ctx, param.name):
                    said = f"{param.opts[0]}{':' * name.endswith(':')}{space}{rest}"
                    raise FedShuffleError(said) from error
            raise


def _option(wanted: str, params: list[click.Parameter]) -> str:
    """What to write instead of an option that does not exist."""
    known = {
        option.lstrip("-").replace("-", "_"): option
        for param in params
        for option in param.opts
        if option.startswith("-")
    }
    near = _synonyms.nearest(wanted, known)
    if "set" in known:
        from fedshuffle.config.reading import key_for

        key = key_for(wanted)
        if key is not None and (near is None or key.rpartition(".")[2] == wanted):
            return f" Write --set {key}=VALUE to change that key of the config."
    return "" if near is None else f" Did you mean {known[near]}?"
