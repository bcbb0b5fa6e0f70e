"""Errors that name the thing at fault and the remedy."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fedshuffle import _synonyms

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys instead of showing them, but for new lines and tabs."""


def visible(text: str) -> str:
    r"""Text from data with its control characters shown, so that no terminal obeys them.

    >>> print(visible("\x1b]0;a new title\x07"))
    \x1b]0;a new title\x07
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class FedShuffleError(ValueError):
    """Something the user can put right: the message says what is wrong and what to do."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(visible(arg) if isinstance(arg, str) else arg for arg in args))


class TrainingError(FedShuffleError):
    """Training could not go on; carries the client, the round and the stage where it stopped."""

    def __init__(self, message: str, *, client: object, round: int, stage: str) -> None:
        super().__init__(f"round {round}, client {client}, {stage}: {message}")
        self.message = message
        self.client = client
        self.round = round
        self.stage = stage

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive the way from a worker process to its parent."""
        again = partial(type(self), client=self.client, round=self.round, stage=self.stage)
        return again, (self.message,)


class DivergedError(TrainingError):
    """Numbers that training needs are no longer finite: the step size was too large."""


def one_line(error: BaseException) -> str:
    r"""What an error says, in one line and without its last full stop.

    >>> one_line(ValueError("spam\n  and eggs."))
    'spam and eggs'
    """
    return " ".join(str(error).split()).rstrip(".")


def user_error(error: BaseException) -> str:
    """An error of the user's code in one line: its kind and what it says.

    Code that calls ``sys.exit`` would end the program without a word, so that is an error as well.

    >>> user_error(ZeroDivisionError("of 0 examples."))
    'ZeroDivisionError: of 0 examples'
    """
    if isinstance(error, SystemExit):
        library = Path(os.__file__).parent
        frames = traceback.extract_tb(error.__traceback__)
        places = [(Path(frame.filename), frame.lineno) for frame in frames]
        own = [(p, n) for p, n in places if p.parent != library and p.suffix == ".py"]
        where = f" in {own[-1][0].name}, line {own[-1][1]}" if own else ""
        return f"sys.exit({error.code!r}) was called{where}; raise an error instead"
    kind, text = type(error).__name__, one_line(error)
    return f"{kind}: {text}" if text else kind


@contextmanager
def failing_at(stage: str) -> Iterator[None]:
    """Say at which stage the user's code failed, in one line.

    >>> with failing_at("evaluation"):
    ...     1 / 0
    Traceback (most recent call last):
    fedshuffle.errors.FedShuffleError: evaluation: ZeroDivisionError: division by zero
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        said = str(error) if isinstance(error, FedShuffleError) else user_error(error)
        raise FedShuffleError(f"{stage}: {said}") from error


def unknown(kind: str, name: object, known: Iterable[str]) -> FedShuffleError:
    """The error for a name that does not exist, with the nearest ones that do."""
    names = sorted(known)
    hint = _synonyms.hint(str(name), names)
    return FedShuffleError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names)}.")
