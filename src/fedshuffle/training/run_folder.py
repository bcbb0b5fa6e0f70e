"""The folder of a run: its settings, one line of metrics per round, and checkpoints.

    DIR/run.json            settings, versions, and the id of this run
    DIR/metrics.jsonl       one line per round
    DIR/checkpoints/        the last states (see :mod:`fedshuffle.training.checkpoint`)
    DIR/clients.rows        client state, for methods that have it
    DIR/.lock               held by the process that writes to the folder

All files but the metrics are moved into place when they are complete, so that a run killed at any
moment leaves only complete files. Metrics reach the disk before the checkpoint of their round. So a
kill may leave more metrics than checkpoints, never fewer; a resumed run drops those after its
checkpoint, and renames later checkpoints to ``*.damaged``. If records are missing all the same, it
resumes from an older checkpoint, or warns about what is lost.

Client state is not copied into a checkpoint, which only refers to rows of ``clients.rows``; rows of
the checkpoints on disk are never overwritten.
"""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedshuffle import _files, fingerprint
from fedshuffle._arrays import count
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.state import State
from fedshuffle.training.checkpoint import (
    Checkpoint,
    DamagedError,
    list_checkpoints,
    read_checkpoint,
    round_of,
    write_checkpoint,
)
from fedshuffle.training.client_state import ClientState, ClientStateStore
from fedshuffle.training.history import MetricsFile
from fedshuffle.training.resume import check_same_settings

_LOCKED: ContextVar[frozenset[str]] = ContextVar("locked run folders", default=frozenset())
"""The folders that this thread has locked."""
_OUTPUTS = ("metrics.jsonl", "model.safetensors", "clients.csv", "tensorboard")
"""What a run overwrites; a run killed before it started may leave an empty file."""
_TYPES: dict[str, type] = {"run": str, "start_sha256": str, "rounds": int, "versions": dict}
"""Entries of ``run.json`` that the resume check does not compare."""


class RunFolder:
    """Reads and writes the folder of one run, with this number of checkpoints.

    The hint ends the sentence "To resume, ..."; by default it says how to call ``train``.
    """

    def __init__(self, path: Path | str, keep: int = 3, resume_hint: str | None = None) -> None:
        self.path = Path(path)
        self.keep = count(keep, "keep")
        call = f"call train again with out={str(path)!r}, resume=True"
        self.resume_hint = call if resume_hint is None else resume_hint
        self._file = self.path / "run.json"
        self._checkpoints = self.path / "checkpoints"
        self._metrics = MetricsFile(self.path / "metrics.jsonl")
        self._store: ClientStateStore | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other writers out of the folder; within one thread this may be nested."""
        place, held = os.path.realpath(self.path), _LOCKED.get()
        if place in held:
            yield
            return
        with ExitStack() as lock:
            with self._writing():
                lock.enter_context(_files.one_writer(self.path))
            token = _LOCKED.set(held | {place})
            try:
                yield
            finally:
                _LOCKED.reset(token)

    def begin(self, settings: Mapping[str, Any], start: State, resume: bool) -> State:
        """Start a run, or resume the one in the folder: the state to continue from."""
        if not resume:
            self.check(resume=False)
            self._id = uuid.uuid4().hex
            identity = {"run": self._id, "start_sha256": fingerprint.tensor(start.x)}
            facts = {**settings, **identity, "versions": fingerprint.versions()}
            with self._writing():
                self._checkpoints.mkdir(parents=True, exist_ok=True)
                self._metrics.path.write_bytes(b"")
                self.save(start)
                _files.atomic_write(self._file, json.dumps(facts, indent=2).encode())  # last
            return start
        begun = self.settings()
        check_same_settings(begun, settings, self.path)
        self.check_rounds(settings["rounds"])
        state, done = self.latest(), self.rounds_done()
        if state is None and done:
            raise FedShuffleError(
                f"{str(self.path)!r} has metrics of {done} rounds, but no valid checkpoint. Put one"
                f" back into {str(self._checkpoints)!r}, or start a new run in another folder."
            )
        if state is None:  # nothing is lost yet
            if fingerprint.tensor(start.x) != begun["start_sha256"]:
                raise FedShuffleError(
                    f"{str(self.path)!r} lost the model it started with, and the model given has"
                    " other parameters. Give the same model, or start a new run in another folder."
                )
            with self._writing():
                self._checkpoints.mkdir(exist_ok=True)
            self.save(state := start)
        with self._writing():
            self._metrics.truncate(state.round)
            for path in list(self._checkpoints.glob("*")):
                if round_of(path) > state.round:  # or it would be kept, and new ones be dropped
                    path.replace(path.with_name(path.name + ".damaged"))
        return state

    def check(self, resume: bool) -> None:
        """Refuse to resume where no run is, and to start one where it would overwrite something."""
        if resume:
            self.settings()
            return
        if self._file.exists():
            raise FedShuffleError(
                f"{str(self.path)!r} already holds a run. To resume, {self.resume_hint}; for a new"
                " run choose another folder."
            )
        if any(round_of(path) > 0 for path in self._checkpoints.glob("*")):
            raise FedShuffleError(
                f"{str(self._checkpoints)!r} holds checkpoints of a run without its run.json. Put"
                " that file back, or choose another folder."
            )
        for name in _OUTPUTS:
            path = self.path / name
            if path.exists() and (path.is_dir() or path.stat().st_size):
                raise FedShuffleError(
                    f"{str(self.path)!r} holds no run, but a {name} that a run would overwrite."
                    " Choose another folder."
                )

    def client_store(self, width: int, dtype: torch.dtype) -> ClientStateStore:
        """The file of client state, with the rows of all checkpoints pinned.

        The file is created with the first row, so this changes nothing in the folder.
        """
        store = self._store
        if store is None or (store.width, store.dtype) != (width, dtype):
            self._store = store = ClientStateStore(width, dtype, self.path / "clients.rows")
            for path in list_checkpoints(self._checkpoints):
                with suppress(DamagedError):  # it cannot be resumed from
                    checkpoint = read_checkpoint(path)
                    if checkpoint.clients:
                        store.pin(checkpoint.state.round, checkpoint.clients["slots"].numpy())
        return store

    def rounds_done(self) -> int:
        """The last round in the metrics or the checkpoints."""
        saved = map(round_of, list_checkpoints(self._checkpoints))
        return max([0, *self._metrics.rounds(), *saved])

    def check_rounds(self, rounds: int) -> None:
        """Refuse fewer rounds than are done."""
        if rounds < (done := self.rounds_done()):
            raise FedShuffleError(
                f"rounds is {rounds}, but the run in {str(self.path)!r} has done {done} already."
                f" Give at least {done}, or start a new run in another folder."
            )

    def settings(self) -> dict[str, Any]:
        """The settings that the run in this folder was started with."""
        if not self._file.exists():
            raise FedShuffleError(f"{str(self.path)!r} holds no run to resume.")
        file, remedy = str(self._file), "Put back a copy of it, or start a new run elsewhere"
        with error_context(
            lambda error: f"{file!r} cannot be read: {error}. {remedy}.",
            (OSError, ValueError, RecursionError),
        ):
            begun: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
        for name, kind in _TYPES.items():
            value = begun.get(name) if isinstance(begun, dict) else None
            if not isinstance(value, kind):
                raise FedShuffleError(
                    f"{file!r} is damaged, or of another version of fedshuffle: its {name} is"
                    f" {value!r:.40}. {remedy}."
                )
        count(begun["rounds"], f"rounds in {file!r}")
        return begun

    def record(self, record: Mapping[str, Any]) -> None:
        """Add the record of a round."""
        with self._writing():
            self._metrics.append(record)

    def metrics(self) -> list[dict[str, Any]]:
        """All records."""
        return self._metrics.read()

    def save(self, state: State) -> None:
        """Write a checkpoint and drop the oldest ones."""
        clients: dict[str, torch.Tensor] = {}
        if isinstance(state.clients, ClientState):
            if state.clients.store is not self._store:
                raise FedShuffleError(
                    f"the client state is not stored in {str(self.path)!r}, so it cannot be saved"
                    " there. Take the store from RunFolder.client_store."
                )
            self._store.pin(state.round, state.clients.slots)
            clients = state.clients.index()
        with self._writing():
            self._metrics.sync()  # metrics are on disk before their checkpoint
            if self._store is not None:
                self._store.sync()
            write_checkpoint(self._checkpoints, Checkpoint(self._id, state, clients))
        for old in list_checkpoints(self._checkpoints)[: -self.keep]:
            with suppress(OSError):  # costs space, nothing else
                old.unlink()
                old.with_suffix(".safetensors").unlink()
        if self._store is not None:
            for dropped in self._store.pins - {*map(round_of, list_checkpoints(self._checkpoints))}:
                self._store.unpin(dropped)

    def latest(self) -> State | None:
        """The newest valid checkpoint with complete metrics before it, or None.

        Damaged ones are skipped with a warning; a checkpoint of another run is refused.
        """
        rounds = self._metrics.rounds()
        complete = next((r for r, round in enumerate(rounds) if round != r + 1), len(rounds))
        states = self._states()
        newest = next(states, None)
        if newest is None or newest.round <= complete:
            return newest
        older = next((state for state in states if state.round <= complete), None)
        fate = "lost" if older is None else f"written again, resuming from round {older.round}"
        warnings.warn(
            f"{str(self._metrics.path)!r} has no record of round {complete + 1}, though round"
            f" {newest.round} was saved: it is {fate}.",
            stacklevel=2,
        )
        return older or newest

    def _states(self) -> Iterator[State]:
        """The states of all valid checkpoints, the newest first."""
        for path in reversed(list_checkpoints(self._checkpoints)):
            try:
                run, state, clients = read_checkpoint(path)
            except DamagedError as error:
                warnings.warn(
                    f"checkpoint {path.name} is damaged ({error}) and skipped.", stacklevel=3
                )
                continue
            if run != self._id:
                raise FedShuffleError(
                    f"checkpoint {str(path)!r} belongs to another run than {str(self._file)!r}. Put"
                    " back those of this run, or move it away to resume from the one before it."
                )
            if clients:
                store = self.client_store(len(state.x), state.x.dtype)
                state = replace(state, clients=ClientState.restore(store, clients))
            yield state

    @cached_property
    def _id(self) -> str:
        return str(self.settings()["run"])

    def _writing(self) -> AbstractContextManager[None]:
        def message(error: OSError) -> str:
            advice = "No run has started there; make room or choose another folder, and try again."
            if self._file.exists():
                advice = f"What was saved is intact; make room. To resume, {self.resume_hint}."
            return f"cannot write to {str(self.path)!r}: {error.strerror}. {advice}"

        return error_context(message, OSError)
