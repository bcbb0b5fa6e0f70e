"""The folder of a run: its settings, a line of metrics a round, and checkpoints to go on from.

    DIR/run.json                        settings, versions, and the id of this run
    DIR/metrics.jsonl                   one line a round
    DIR/checkpoints/00000100.json       round, run and checksum; written last, so it vouches for
    DIR/checkpoints/00000100.safetensors    the model and all that the server remembers
    DIR/clients.rows                    what the clients keep, if the method lets them
    DIR/.lock                           held by the process that writes here, while it does

JSON has no NaN: a metric that is not finite, as that of a model that has diverged, is null in the
metrics and NaN in Python. Every file but the metrics is written under another name and moved into
place, so that a run killed at any moment leaves only whole files. The start is a checkpoint, too.

The metrics are on the disk before the checkpoint of their round is, so a kill may leave more of
them, but never fewer. A resumed run forgets the metrics after its checkpoint, and renames to
``*.damaged`` what lies beyond it. If records are missing all the same, it resumes from an older
checkpoint and writes them again; if none is old enough, it says what is lost. A checkpoint counts
only if its checksum, which covers all of it, fits, if it lies under the name of its round, and if
it belongs to the run of ``run.json``.

What clients keep is not copied into a checkpoint, which says only in which rows of the file it
stands: those of the checkpoints on disk are never overwritten. They are checked when they are read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import signal
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from fedshuffle import _files, _identity
from fedshuffle._arrays import count
from fedshuffle.client_memory import ClientMemory, Shelf
from fedshuffle.errors import FedShuffleError
from fedshuffle.state import State

FACTS = (
    "round",
    "clients",
    "steps",
    "bytes_down",
    "bytes_up",
    "cohort",
    "seconds",
    "evaluation_seconds",
)
"""What a record holds besides what was evaluated."""

_WRITTEN: ContextVar[frozenset[str]] = ContextVar("run folders written to", default=frozenset())
"""The folders that this thread holds the lock of."""


@final
class RunFolder:
    """Reads and writes the folder of one run.

    Args:
        path: the folder.
        keep: how many checkpoints to keep.
        how_to_resume: ends a sentence "To go on, ...".
    """

    def __init__(self, path: Path, keep: int = 3, how_to_resume: str | None = None) -> None:
        self.path = path
        self.keep = keep
        self.how_to_resume = (
            f"call train again with out={str(path)!r}, resume=True"
            if how_to_resume is None
            else how_to_resume
        )
        self._checkpoints = path / "checkpoints"
        self._metrics = path / "metrics.jsonl"
        self._shelf: Shelf | None = None
        self._id: str | None = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep other writers out of the folder; within one thread this may be nested."""
        place, held = os.path.realpath(self.path), _WRITTEN.get()
        if place in held:
            yield
            return
        with ExitStack() as lock:
            self._checked(lambda: lock.enter_context(_files.one_writer(self.path)))
            token = _WRITTEN.set(held | {place})
            try:
                yield
            finally:
                _WRITTEN.reset(token)

    def begin(self, settings: Mapping[str, Any], start: State, resume: bool) -> State:
        """Open the folder; the state to go on from, or the start, which is saved as well."""
        if not resume:
            self._begin_anew(settings, start)
            return start
        begun = self.settings()
        _same_settings(begun, settings, self.path)
        self.check_rounds(settings["rounds"])
        state, done = self.latest(), self.rounds_done()
        if state is None and done:
            raise FedShuffleError(
                f"{str(self.path)!r} has metrics of {done} rounds, but no whole checkpoint to go on"
                f" from. Put one back into {str(self._checkpoints)!r}, or begin anew in another"
                " folder."
            )
        if state is None:  # nothing is lost yet
            if _identity.tensor(start.x) != begun["start_sha256"]:
                raise FedShuffleError(
                    f"{str(self.path)!r} lost the model that it began with, and the one given has"
                    " other parameters. Give the same to go on, or begin anew in another folder."
                )
            self._checked(lambda: self._checkpoints.mkdir(exist_ok=True))
            self.save(state := start)
        self._forget_after(state.round)
        return state

    def check(self, resume: bool) -> None:
        """Refuse a folder without a run to go on with, or with one where none may be."""
        if resume:
            self.settings()
            return
        if (self.path / "run.json").exists():
            raise FedShuffleError(
                f"{str(self.path)!r} holds a run already. To go on, {self.how_to_resume}; to begin"
                " anew, choose another folder."
            )
        if any(_round(path) > 0 for path in self._checkpoints.glob("*")):
            raise FedShuffleError(
                f"{str(self._checkpoints)!r} holds checkpoints of a run without its run.json. Put"
                " that file back, or choose another folder."
            )
        for name in _OUTPUTS:
            path = self.path / name
            if path.exists() and (path.is_dir() or path.stat().st_size):
                raise FedShuffleError(
                    f"{str(self.path)!r} holds no run, but a {name} that a run would write over."
                    " Choose another folder."
                )

    def shelf(self, width: int, dtype: torch.dtype) -> Shelf:
        """Where the clients of this run keep their rows; the rows of all checkpoints are pinned.

        The file is made with the first row, so this changes nothing in the folder.
        """
        known = self._shelf
        if known is None or (known.width, known.dtype) != (width, dtype):
            self._shelf = known = Shelf(width, dtype, self.path / "clients.rows")
            for facts in self._saved():
                with suppress(_DamagedError):  # nobody can go on from it
                    _, state, index = _read(facts)
                    if index:
                        known.pin(state.round, index["slots"].numpy())
        return known

    def _begin_anew(self, settings: Mapping[str, Any], start: State) -> None:
        self.check(resume=False)
        made = self.path / "run.json"

        def open_metrics() -> None:
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            self._metrics.write_bytes(b"")

        self._id = uuid.uuid4().hex
        identity = {"run": self._id, "start_sha256": _identity.tensor(start.x)}
        text = json.dumps({**settings, **identity, "versions": versions()}, indent=2)
        self._checked(open_metrics)
        self.save(start)
        self._checked(lambda: _files.replace(made, text.encode()))  # last: now there is a run

    def rounds_done(self) -> int:
        """How many rounds stand in the metrics or the checkpoints."""
        recorded = max((record["round"] for _, record in self._lines()), default=0)
        return max(recorded, *(_round(path) for path in self._saved()), 0)

    def check_rounds(self, rounds: int) -> None:
        """Refuse fewer rounds than are done."""
        if rounds < (done := self.rounds_done()):
            raise FedShuffleError(
                f"rounds is {rounds}, but the run in {str(self.path)!r} has done {done} already."
                f" Give at least {done}; fewer need a run anew in another folder."
            )

    def settings(self) -> dict[str, Any]:
        """What the run in this folder was begun with."""
        made = self.path / "run.json"
        if not made.exists():
            raise FedShuffleError(f"{str(self.path)!r} holds no run to go on with.")
        remedy = "Put back a copy of it, or begin anew in another folder"
        try:
            begun: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise FedShuffleError(f"{str(made)!r} cannot be read: {error}. {remedy}.") from error
        for name, kind in _SHAPE.items():
            value = begun.get(name) if isinstance(begun, dict) else None
            if not isinstance(value, kind):
                raise FedShuffleError(
                    f"{str(made)!r} is damaged, or of another version of fedshuffle: its {name} is"
                    f" {value!r:.40}. {remedy}."
                )
        count(begun["rounds"], f"rounds in {str(made)!r}")
        return begun

    def record(self, line: Mapping[str, Any]) -> None:
        """Add the metrics of a round."""
        plain = {k: None if v != v else v for k, v in line.items()}
        text = json.dumps(plain, allow_nan=False) + "\n"
        self._checked(lambda: _append(self._metrics, text))

    def metrics(self) -> list[dict[str, Any]]:
        """All lines so far."""
        records = [record for _, record in self._lines()]
        return [{k: math.nan if v is None else v for k, v in r.items()} for r in records]

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """The whole lines of the metrics, and what they say."""
        try:
            data = self._metrics.read_bytes()
        except OSError as error:
            raise FedShuffleError(
                f"{str(self._metrics)!r} cannot be read: {error.strerror}. Put back a copy of it,"
                " or begin anew in another folder."
            ) from None
        last = 0
        for number, line in enumerate(data.split(b"\n")[:-1], 1):  # the last is cut short, or empty
            try:
                record = json.loads(line)
                if type(record) is not dict or type(record.get("round")) is not int:
                    raise ValueError("it has no round")
                if record["round"] <= last:
                    raise ValueError(f"round {record['round']} after round {last}")
            except (ValueError, RecursionError) as error:
                raise FedShuffleError(
                    f"line {number} of {str(self._metrics)!r} is broken ({error!s:.80}). Put"
                    " back a copy of the file, or delete that line and do without the record."
                ) from error
            last = record["round"]
            yield line, record

    def save(self, state: State) -> None:
        """Write a checkpoint and drop the oldest beyond the number kept."""
        tensors = {"x": state.x} | {f"memory.{k}": v for k, v in state.memory.items()}
        if state.clients is not None:
            tensors |= {f"clients.{k}": v for k, v in self._pinned(state.clients, state.round)}
        data = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
        name = self._checkpoints / _stem(state.round)
        facts = {"round": state.round, "run": self._run}
        facts["sha256"] = _checksum(facts, data)

        def write() -> None:
            _settle(self._metrics)  # a checkpoint vouches for the metrics before it, too
            if self._shelf is not None:
                self._shelf.settle()
            _files.replace(name.with_suffix(".safetensors"), data)
            _files.replace(name.with_suffix(".json"), json.dumps(facts).encode())

        self._checked(write)
        for old in self._saved()[: -self.keep]:
            with suppress(OSError):  # room is lost, and nothing else
                old.unlink()
                old.with_suffix(".safetensors").unlink()
        if self._shelf is not None:
            kept = {_round(path) for path in self._saved()}
            for dropped in self._shelf.pins - kept:
                self._shelf.unpin(dropped)

    def _pinned(self, clients: ClientMemory, round: int) -> Iterable[tuple[str, Tensor]]:
        """Where the clients' rows are, and from now on will be as long as the checkpoint is."""
        if clients.shelf is not self._shelf:
            raise FedShuffleError(
                f"what the clients keep is not in {str(self.path)!r}, so it cannot be saved there."
                " Take the shelf from RunFolder.shelf."
            )
        clients.shelf.pin(round, clients.slots)
        return clients.index().items()

    def latest(self) -> State | None:
        """The newest checkpoint that is whole, and so are the metrics before it, if there is one.

        Those that are damaged are named and passed over; one of another run is refused.
        """
        rounds = [record["round"] for _, record in self._lines()]
        whole = next((r for r, found in enumerate(rounds) if found != r + 1), len(rounds))
        states = self._states()
        newest = next(states, None)
        if newest is None or newest.round <= whole:
            return newest
        older = next((state for state in states if state.round <= whole), None)
        fate = "lost" if older is None else f"written again, going back to round {older.round}"
        warnings.warn(
            f"{str(self._metrics)!r} has no record of round {whole + 1}, though round"
            f" {newest.round} was saved: it is {fate}.",
            stacklevel=2,
        )
        return older or newest

    def _states(self) -> Iterator[State]:
        """The checkpoints that are whole, the newest first."""
        for facts in reversed(self._saved()):
            try:
                run, state, index = _read(facts)
            except _DamagedError as error:
                warnings.warn(
                    f"checkpoint {facts.name} is damaged ({error}) and passed over.",
                    stacklevel=3,
                )
                continue
            if run != self._run:
                raise FedShuffleError(
                    f"checkpoint {str(facts)!r} belongs to another run than"
                    f" {str(self.path / 'run.json')!r}. Put back those of this run, or move it away"
                    " to go on from the one before it."
                )
            if index:
                shelf = self.shelf(len(state.x), state.x.dtype)
                state = replace(state, clients=ClientMemory.restore(shelf, index))
            yield state

    @property
    def _run(self) -> str:
        """The id of the run in this folder."""
        if self._id is None:
            self._id = self.settings()["run"]
        return self._id

    def _saved(self) -> list[Path]:
        """The checkpoints on disk, by round, whether they are whole or not."""
        return sorted((p for p in self._checkpoints.glob("*.json") if _round(p) >= 0), key=_round)

    def _forget_after(self, round: int) -> None:
        """Drop the metrics of rounds that will be done again, and set aside what is damaged."""
        kept = [line + b"\n" for line, record in self._lines() if record["round"] <= round]

        def write() -> None:
            _files.replace(self._metrics, b"".join(kept))
            for path in list(self._checkpoints.glob("*")):
                if _round(path) > round:  # else it would be kept, and new ones be dropped for it
                    path.replace(path.with_name(path.name + ".damaged"))

        self._checked(write)

    def _checked(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            advice = "No run has begun there; make room or choose another folder, and begin again."
            if (self.path / "run.json").exists():
                advice = (
                    f"What was saved before is whole; make room. To go on, {self.how_to_resume}."
                )
            raise FedShuffleError(
                f"cannot write to {str(self.path)!r}: {error.strerror}. {advice}"
            ) from error


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM stop a run as Ctrl-C does, unless the program has its own way with it."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM while something short must be finished, such as the last save."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not None:  # else it could not be put back
                before[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def versions() -> dict[str, str]:
    """What a result depends on besides its settings."""
    import fedshuffle

    return {
        "fedshuffle": fedshuffle.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
    }


_OUTPUTS = ("metrics.jsonl", "model.safetensors", "clients.csv", "tensorboard")
"""What a run writes over; an empty file may be left of one that was killed before it began."""
_SHAPE: dict[str, type] = {"run": str, "start_sha256": str, "rounds": int, "versions": dict}
"""What ``run.json`` needs besides the settings that are compared one by one."""


class _DamagedError(Exception):
    """A checkpoint that cannot be read."""


def _stem(round: int) -> str:
    return f"{round:08d}"


def _round(path: Path) -> int:
    """The round of a file of a checkpoint; -1 for any other file."""
    whole = path.suffix in (".json", ".safetensors") and path.stem.isdecimal()
    return int(path.stem) if whole and path.stem == _stem(int(path.stem)) else -1


def _checksum(facts: Mapping[str, Any], data: bytes) -> str:
    """Of all that a checkpoint says."""
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode() + b"\n" + data).hexdigest()


def _read(path: Path) -> tuple[str, State, dict[str, Tensor]]:
    """Of which run a checkpoint is, its state, and the index of what its clients keep, if any."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        data = path.with_suffix(".safetensors").read_bytes()
        if facts.pop("sha256") != _checksum(facts, data):
            raise ValueError("its checksum does not fit")
        run, round = facts["run"], facts["round"]
        if path.stem != _stem(round):
            raise ValueError(f"it is of round {round}")
        tensors = load(data)
        x = tensors.pop("x")
    except Exception as error:  # of whichever shape: nothing was done with it yet
        said = " ".join(f"{error}".split())
        raise _DamagedError(said if type(error) is ValueError else f"{error!r:.80}") from error
    memory, index = (
        {name.removeprefix(kind): t for name, t in tensors.items() if name.startswith(kind)}
        for kind in ("memory.", "clients.")
    )
    return run, State(x, memory, round=round), index


def _same_settings(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """A run goes on only with the settings it began with; more rounds are welcome."""
    for name, value in new.items():
        if name == "rounds":
            continue
        if name not in old:
            made = old.get("versions", {}).get("fedshuffle", "another version")
            raise FedShuffleError(
                f"the run in {str(path)!r} does not say with which {name} it was begun, so it is of"
                f" an older fedshuffle ({made}). Go on with that one, or begin anew in another"
                " folder."
            )
        if old[name] != value:
            begun, now, remedy = _difference(old[name], value, name)
            raise FedShuffleError(
                f"the run in {str(path)!r} was begun with {begun}, not {now}. {remedy}, or another"
                " folder to begin anew."
            )


def _difference(old: Any, new: Any, name: str) -> tuple[str, str, str]:
    """What was, what is, and how to put it right."""
    if name in _DIGESTS:
        what, remedy = _DIGESTS[name]
        return f"other {what}", "these", remedy
    if isinstance(old, Mapping) and isinstance(new, Mapping):  # schedules
        at = next(r for r in {**old, **new} if old.get(r) != new.get(r))
        return f"{name} {old.get(at)!r} in round {at}", repr(new.get(at)), _SAME
    return f"{name} {old!r}", repr(new), _SAME


_SAME = "Use the same settings to go on"


_DIGESTS = {
    "clients_sha256": ("client sizes, weights or sampling", "Use the same to go on"),
    "data_sha256": ("data", "Use the same examples in the same order to go on"),
    "answers_sha256": ("probabilities to answer", "Use the same answers to go on"),
    "model_sha256": (
        "names, shapes or kinds of the model's parameters",
        "Use the same architecture to go on",
    ),
    "frozen_sha256": (
        "values in the model's frozen parameters or buffers",
        "Checkpoints hold only what is trained: seed the model's construction, or pass the same"
        " frozen parts, to go on",
    ),
}


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _settle(path: Path) -> None:
    """See to it that what was appended is on the disk."""
    with path.open("ab") as file:
        os.fsync(file.fileno())
