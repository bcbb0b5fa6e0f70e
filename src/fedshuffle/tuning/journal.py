"""A file of finished trials, so that none is repeated after an interruption."""

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path

from fedshuffle import _files
from fedshuffle.errors import FedShuffleError, error_context, one_line
from fedshuffle.tuning import JOURNAL
from fedshuffle.tuning.short_runs import Trial

_NAMES = [field.name for field in fields(Trial)]

Key = tuple[float, float, int, int]
"""Step sizes, rounds and stage of a trial."""


def key(trial: Trial) -> Key:
    """What tells a trial apart from others."""
    return trial.step_size, trial.server_step_size, trial.rounds, trial.stage


class Journal:
    """The finished trials of one tuning, in a file of one JSON object per line, or in memory."""

    def __init__(self, path: Path | None, settings: str) -> None:
        self._path, self._settings = path, settings
        self.trials: dict[Key, Trial] = {}
        """The finished trials."""
        if path is not None and path.exists():
            with self._reading(path):
                for number, line in enumerate(_complete_lines(path), 1):
                    found = self._read(line, number)
                    self.trials[key(found)] = found

    def add(self, trial: Trial) -> Trial:
        """Note a finished trial."""
        self.trials[key(trial)] = trial
        if self._path is not None:
            line = json.dumps({"settings": self._settings, **asdict(trial)}, allow_nan=False)
            with _writing(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        return trial

    def _read(self, line: str, number: int) -> Trial:
        try:
            found = dict(json.loads(line))
            settings = found.pop("settings")
            numbers = {name: found[name] for name in _NAMES}
            kinds = {type(x) for name, x in numbers.items() if (name, x) != ("loss", None)}
            if not kinds <= {int, float, bool}:
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(f"line {number} is no trial") from None
        if settings != self._settings:
            raise FedShuffleError(
                f"{str(self._path)!r} holds trials of another run: its model, data or settings"
                " differ. Delete the file, or choose another folder."
            )
        return Trial(**numbers)

    def _reading(self, path: Path) -> AbstractContextManager[None]:
        def message(error: Exception) -> FedShuffleError | str:
            if isinstance(error, FedShuffleError):
                return error
            why = one_line(error)
            return f"{str(path)!r} cannot be read: {why}. Delete it, to repeat its trials."

        return error_context(message, (OSError, ValueError))


def _complete_lines(path: Path) -> list[str]:
    """The lines of a file; one that was cut off by a kill is removed from it."""
    whole, _, rest = path.read_bytes().rpartition(b"\n")
    if rest:
        _files.atomic_write(path, whole + b"\n" if whole else b"")
    return whole.decode().split("\n") if whole else []


@contextmanager
def opened(folder: str | os.PathLike[str] | None, settings: str) -> Iterator[Journal]:
    """The journal in a folder, for this process alone; in memory if there is none."""
    if folder is None:
        yield Journal(None, settings)
        return
    with ExitStack() as stack:
        with _writing(Path(folder)):
            stack.enter_context(_files.one_writer(Path(folder)))
        yield Journal(Path(folder) / JOURNAL, settings)


def _writing(path: Path) -> AbstractContextManager[None]:
    return error_context(
        lambda error: (
            f"cannot write {str(path)!r}: {error.strerror}. Make room, or choose another folder."
        ),
        OSError,
    )
