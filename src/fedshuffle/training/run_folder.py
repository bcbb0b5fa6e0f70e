"""The folder of a run: its settings, one line of metrics per round, and checkpoints.

    DIR/run.json            settings, versions, and the id of this run
    DIR/metrics.jsonl       one line per round
    DIR/checkpoints/        the last states, of two files each:
        00000100.safetensors    the model, and the state of the method and of transforms
        00000100.json           round, time, id of the run, and a checksum over both files
    DIR/clients.rows        client state, of the method or of a transform
    DIR/.lock               held by the process that writes to the folder

All files but the metrics are moved into place when they are complete, the JSON file of a checkpoint
last. Metrics reach the disk before the checkpoint of their round, so that a kill may leave more
metrics than checkpoints, never fewer. ``docs/how-to/resume.md`` says what happens to damaged files.
"""

import json
import math
import os
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedshuffle import _files, fingerprint
from fedshuffle._arrays import count, jsonable
from fedshuffle.errors import FedShuffleError, error_context, one_line, visible
from fedshuffle.state import State
from fedshuffle.training import checkpoint
from fedshuffle.training.checkpoint import round_of
from fedshuffle.training.client_state import ClientState, ClientStateStore

_OUTPUTS = ("metrics.jsonl", "model.safetensors", "clients.csv", "clients.rows", "tensorboard")
"""What a run overwrites; a run killed before it started may leave an empty file."""
_DIGESTS = {
    "clients_sha256": "client sizes, weights or sampling",
    "clock_sha256": "times or bandwidths of clients in the clock",
    "data_sha256": "data (the same examples in the same order are needed)",
    "response_probability_sha256": "response probabilities",
    "model_sha256": "names, shapes or dtypes of the model's parameters",
    "frozen_sha256": "values in the model's frozen parameters or buffers, which checkpoints do not"
    " hold (seed the model's construction)",
}
"""Settings of which only a digest is stored."""


class RunFolder:
    """Reads and writes the folder of one run.

    Args:
        path: the folder.
        keep: the number of checkpoints to keep.
        resume_hint: ends the sentence "To resume, ..."; by default how to call ``train``.
        write_config: is called when the run begins or is resumed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keep: int = 3,
        resume_hint: str | None = None,
        write_config: Callable[[], None] | None = None,
    ) -> None:
        self.path = Path(path)
        self.keep = count(keep, "keep")
        call = f"call train again with out={str(self.path)!r}, resume=True"
        self.resume_hint = resume_hint or call
        self._file = self.path / "run.json"
        self._checkpoints = self.path / "checkpoints"
        self._metrics = self.path / "metrics.jsonl"
        self._write_config = write_config or (lambda: None)
        self._store: ClientStateStore | None = None
        self._locked = False
        self._last: State

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run that can be resumed."""
        return self._file.exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other writers out of the folder; this may be nested."""
        with ExitStack() as lock:
            if not self._locked:
                with self._writing():
                    lock.enter_context(_files.one_writer(self.path))
                self._locked = True
                lock.callback(setattr, self, "_locked", False)
            yield

    def check(self, resume: bool) -> None:
        """Refuse to resume where no run is, and to start one where it would overwrite something."""
        if resume:
            self.settings()
            return
        if self.begun:
            raise FedShuffleError(
                f"{str(self.path)!r} already holds a run. To resume, {self.resume_hint}; for a new"
                " run choose another folder."
            )
        paths = [self.path / name for name in _OUTPUTS]
        paths = [path for path in paths if path.is_dir() or (path.exists() and path.stat().st_size)]
        paths += [path for path in self._checkpoints.glob("*") if round_of(path) > 0]
        for path in paths:
            raise FedShuffleError(
                f"{str(self.path)!r} has no run.json, but {path.name}, which a run would overwrite."
                " Put run.json back, or choose another folder."
            )

    def settings(self) -> dict[str, Any]:
        """The settings that the run in this folder was started with."""
        if not self.begun:
            raise FedShuffleError(
                f"{str(self.path)!r} holds no run to resume: give the folder of one, or start one."
            )
        with self._reading(self._file):
            begun = dict(json.loads(self._file.read_text(encoding="utf-8")))
            # These are not compared when the run is resumed.
            types = {"run": str, "start_sha256": str, "rounds": int, "versions": dict}
            for name, kind in types.items():
                if not isinstance(begun.get(name), kind):
                    raise ValueError(f"its {name} is {begun.get(name)!r:.40}")
            count(begun["rounds"], "rounds")
        return begun

    def begin(self, settings: Mapping[str, Any], start: State, resume: bool) -> State:
        """Start a run, or resume the one in the folder: the state to continue from."""
        if resume:
            self._last = self._resumed(settings, start)
            self._write_config()
            return self._last
        self.check(resume=False)
        self._id = uuid.uuid4().hex
        identity = {"run": self._id, "start_sha256": fingerprint.tensor(start.x)}
        facts = {**settings, **identity, "versions": fingerprint.versions()}
        with self._writing():
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            self._metrics.write_bytes(b"")
            self.save(start)
            self._write_config()
            _files.atomic_write(self._file, json.dumps(facts, indent=2).encode())  # last
        self._last = start
        return start

    def _resumed(self, settings: Mapping[str, Any], start: State) -> State:
        """The newest state; what is newer, and not complete, is put aside."""
        self._check_same(settings)
        self.check_rounds(settings["rounds"])
        state = self.latest(start.x.device)
        if state is None:
            raise FedShuffleError(
                f"{str(self.path)!r} has no valid checkpoint. Put one back into"
                f" {str(self._checkpoints)!r}, or start a new run in another folder."
            )
        kept = [_line(record) for record in self._records() if record["round"] <= state.round]
        with self._writing():
            _files.atomic_write(self._metrics, "".join(kept).encode())
            for path in list(self._checkpoints.glob("*")):
                if round_of(path) > state.round:  # or it would be kept, and new ones be dropped
                    path.replace(path.with_name(path.name + ".damaged"))
        return state

    def _check_same(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings that differ from those of the run; ``rounds`` may differ."""
        begun = self.settings()
        for name, now in settings.items():
            old = begun.get(name)
            if name == "rounds" or old == now:
                continue
            before, after = f"{name} {old!r}", repr(now)
            if name in _DIGESTS:
                before, after = f"other {_DIGESTS[name]}", "these"
            elif isinstance(old, Mapping) and isinstance(now, Mapping):  # schedules
                at = next(r for r in {**old, **now} if old.get(r) != now.get(r))
                before, after = f"{name} {old.get(at)!r} in round {at}", repr(now.get(at))
            raise FedShuffleError(
                f"the run in {str(self.path)!r} was started with {before}, not {after}. Use the"
                " same to resume, or choose another folder for a new run."
            )

    def check_rounds(self, rounds: int) -> None:
        """Refuse fewer rounds than are done."""
        recorded = [record["round"] for record in self._records()]
        if rounds < (done := max([0, *recorded, *map(round_of, self._saved())])):
            raise FedShuffleError(
                f"rounds is {rounds}, but the run in {str(self.path)!r} has done {done} already."
                f" Give at least {done}, or start a new run in another folder."
            )

    # While the run trains -------------------------------------------------------------------------

    def add(self, record: Mapping[str, Any], state: State, save: bool) -> None:
        """Add the record of a round, and if asked, save the state after it."""
        self.record(record)
        self._last = state
        if save:
            self.save(state)

    @contextmanager
    def saved_when_stopped(self) -> Iterator[None]:
        """Save the last complete round if the run stops within, and say how to resume it."""
        try:
            yield
        except (KeyboardInterrupt, Exception):
            self.save(self._last)
            done = f"Stopped after round {self._last.round}, which is saved"
            print(visible(f"{done}. To resume, {self.resume_hint}."), file=sys.stderr)
            raise

    def record(self, record: Mapping[str, Any]) -> None:
        """Add the record of a round; it reaches the disk before the next checkpoint."""
        with self._writing(), self._metrics.open("a", encoding="utf-8") as file:
            file.write(_line(record))

    def metrics(self) -> list[dict[str, Any]]:
        """All records. JSON has no NaN: it is null in the file, and NaN here."""
        return [
            {name: math.nan if value is None else value for name, value in record.items()}
            for record in self._records()
        ]

    def save(self, state: State) -> None:
        """Write a checkpoint and drop the oldest ones."""
        clients: dict[str, Tensor] = {}
        if isinstance(state.clients, ClientState):
            assert state.clients.store is self._store
            self._store.pin(state.round, state.clients.slots)
            clients = state.clients.index()
        with self._writing():
            with self._metrics.open("ab") as file:
                os.fsync(file.fileno())  # metrics are on disk before their checkpoint
            if self._store is not None:
                self._store.sync()
            checkpoint.write(self._checkpoints, self._id, state, clients)
        for old in self._saved()[: -self.keep]:
            with suppress(OSError):  # costs space, nothing else
                old.unlink()
                old.with_suffix(".safetensors").unlink()
        if self._store is not None:
            kept = set(map(round_of, self._saved()))
            self._store.pins = {k: slots for k, slots in self._store.pins.items() if k in kept}

    # Reading --------------------------------------------------------------------------------------

    def client_store(self, width: int, dtype: torch.dtype) -> ClientStateStore:
        """The file of client state, made with its first row; rows of checkpoints are pinned."""
        if self._store is None:
            self._store = ClientStateStore(width, dtype, self.path / "clients.rows")
            run = self._id if self.begun else ""
            for path in self._saved() if run else ():
                with suppress(FedShuffleError):  # it cannot be resumed from
                    state, clients = checkpoint.read(path, run, "cpu")
                    if clients:
                        self._store.pin(state.round, clients["slots"].numpy())
        return self._store

    def latest(self, device: torch.device | str = "cpu") -> State | None:
        """The newest valid checkpoint with complete metrics before it, or None.

        Damaged ones are skipped with a warning; a checkpoint of another run is refused.
        """
        rounds = [record["round"] for record in self._records()]
        complete = next((r for r, round in enumerate(rounds) if round != r + 1), len(rounds))
        states = self._states(device)
        newest = next(states, None)
        if newest is None or newest.round <= complete:
            return newest
        older = next((state for state in states if state.round <= complete), None)
        fate = "lost" if older is None else f"written again, resuming from round {older.round}"
        warnings.warn(
            f"{str(self._metrics)!r} has no record of round {complete + 1}, though round"
            f" {newest.round} was saved: it is {fate}.",
            stacklevel=2,
        )
        return older or newest

    def _saved(self) -> list[Path]:
        """The ``.json`` files of all checkpoints, valid or not, by round."""
        paths = self._checkpoints.glob("*.json")
        return sorted((path for path in paths if round_of(path) >= 0), key=round_of)

    def _states(self, device: torch.device | str) -> Iterator[State]:
        """The states of all valid checkpoints, the newest first."""
        run = self._id
        for path in reversed(self._saved()):
            try:
                state, clients = checkpoint.read(path, run, device)
            except FedShuffleError as error:
                warnings.warn(f"{path.name} is damaged ({error}) and skipped.", stacklevel=3)
                continue
            if clients:
                store = self.client_store(len(state.x), state.x.dtype)
                state = replace(state, clients=ClientState.restore(store, clients))
            yield state

    def _records(self) -> list[dict[str, Any]]:
        """All complete lines of the metrics, which must be of ascending rounds."""
        with self._reading(self._metrics):
            lines = self._metrics.read_bytes().split(b"\n")[:-1]  # the last is empty or cut off
            records: list[dict[str, Any]] = json.loads(b"[" + b",\n".join(lines) + b"]")
            last = 0
            for line, record in enumerate(records, 1):
                if type(record) is not dict or type(record.get("round")) is not int:
                    raise ValueError(f"line {line} has no round")
                if record["round"] <= last:
                    raise ValueError(f"line {line} is of round {record['round']}, after {last}")
                last = record["round"]
        return records

    def _reading(self, path: Path) -> AbstractContextManager[None]:
        return error_context(
            lambda error: (
                f"{str(path)!r} cannot be read: {one_line(error)}. Put back a copy of it, or start"
                " a new run in another folder."
            ),
            (OSError, ValueError, TypeError, RecursionError),
        )

    @cached_property
    def _id(self) -> str:
        return str(self.settings()["run"])

    def _writing(self) -> AbstractContextManager[None]:
        def message(error: OSError) -> str:
            advice = "No run has started there; make room or choose another folder, and try again."
            if self.begun:
                advice = f"What was saved is intact; make room. To resume, {self.resume_hint}."
            return f"cannot write to {str(self.path)!r}: {error.strerror}. {advice}"

        return error_context(message, OSError)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(jsonable(record), allow_nan=False) + "\n"
