"""The folder of a run: its settings, a line of metrics a round, and checkpoints to go on from.

    DIR/run.json                        settings and versions
    DIR/metrics.jsonl                   one line a round
    DIR/checkpoints/00000100.json       round and checksum; written last, so it vouches for
    DIR/checkpoints/00000100.safetensors    the model and all that the server remembers

JSON has no NaN: a metric that is not finite, as that of a model that has diverged, is null in the
metrics and NaN in Python. Every file but the metrics is written under another name and moved into
place, so that a run killed at any moment leaves only whole files. A run that goes on forgets the
metrics after its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors.torch import load, save

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

    def begin(self, settings: Mapping[str, Any], resume: bool) -> State | None:
        """Open the folder; the state to go on from, or None at the very start."""
        made = self.path / "run.json"
        if not resume:
            if made.exists():
                raise FedShuffleError(
                    f"{str(self.path)!r} holds a run already. To go on, {self.how_to_resume}; to"
                    " begin anew, choose another folder."
                )

            def write() -> None:
                self._checkpoints.mkdir(parents=True, exist_ok=True)
                self._metrics.write_bytes(b"")
                _replace(made, json.dumps({**settings, "versions": versions()}, indent=2).encode())

            self._checked(write)
            return None
        _same_settings(self.settings(), settings, self.path)
        state = self.latest()
        self._forget_after(0 if state is None else state.round)
        return state

    def settings(self) -> dict[str, Any]:
        """What the run in this folder was begun with."""
        made = self.path / "run.json"
        if not made.exists():
            raise FedShuffleError(f"{str(self.path)!r} holds no run to go on with.")
        try:
            begun: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FedShuffleError(f"{str(made)!r} cannot be read: {error}.") from error
        return begun

    def record(self, line: Mapping[str, Any]) -> None:
        """Add the metrics of a round."""
        plain = {k: None if v != v else v for k, v in line.items()}
        text = json.dumps(plain, allow_nan=False) + "\n"
        self._checked(lambda: _append(self._metrics, text))

    def metrics(self) -> list[dict[str, Any]]:
        """All lines so far."""
        lines = self._metrics.read_text(encoding="utf-8").split("\n")
        records = [json.loads(line) for line in lines if line]
        return [{k: math.nan if v is None else v for k, v in r.items()} for r in records]

    def save(self, state: State) -> None:
        """Write a checkpoint and drop the oldest beyond the number kept."""
        tensors = {"x": state.x} | {f"memory.{k}": v for k, v in state.memory.items()}
        data = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
        name = self._checkpoints / f"{state.round:08d}"
        facts = {"round": state.round, "sha256": hashlib.sha256(data).hexdigest()}

        def write() -> None:
            _settle(self._metrics)  # a checkpoint vouches for the metrics before it, too
            _replace(name.with_suffix(".safetensors"), data)
            _replace(name.with_suffix(".json"), json.dumps(facts).encode())

        self._checked(write)
        for old in sorted(self._checkpoints.glob("*.json"))[: -self.keep]:
            old.unlink()
            old.with_suffix(".safetensors").unlink(missing_ok=True)

    def latest(self) -> State | None:
        """The newest checkpoint that is whole; a damaged one is named and passed over."""
        for facts in sorted(self._checkpoints.glob("*.json"), reverse=True):
            try:
                return _read(facts)
            except (OSError, ValueError, KeyError) as error:
                warnings.warn(
                    f"checkpoint {facts.name} is damaged ({error}); going on from the one before.",
                    stacklevel=2,
                )
        return None

    def _forget_after(self, round: int) -> None:
        """Drop the metrics of rounds that will be done again, and any half-written line."""
        kept = []
        if not self._metrics.exists():
            raise FedShuffleError(
                f"{str(self._metrics)!r} is missing: put it back, or begin anew in another folder."
            )
        for line in self._metrics.read_text(encoding="utf-8").split("\n")[:-1]:
            if json.loads(line)["round"] <= round:
                kept.append(line + "\n")
        _replace(self._metrics, "".join(kept).encode())

    def _checked(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            raise FedShuffleError(
                f"cannot write to {str(self.path)!r}: {error.strerror}. What was saved before is"
                f" whole; make room or choose another folder. To go on, {self.how_to_resume}."
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


def versions() -> dict[str, str]:
    """What a result depends on besides its settings."""
    import fedshuffle

    return {
        "fedshuffle": fedshuffle.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
    }


def _read(facts: Path) -> State:
    known = json.loads(facts.read_text(encoding="utf-8"))
    data = facts.with_suffix(".safetensors").read_bytes()
    if hashlib.sha256(data).hexdigest() != known["sha256"]:
        raise ValueError("its checksum does not fit")
    tensors = load(data)
    x = tensors.pop("x")
    memory = {name.removeprefix("memory."): tensor for name, tensor in tensors.items()}
    return State(x, memory, int(known["round"]))


def _same_settings(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """A run goes on only with the settings it began with; more rounds are welcome."""
    for name, value in new.items():
        if name != "rounds" and old.get(name) != value:
            raise FedShuffleError(
                f"the run in {str(path)!r} was begun with {name} {old.get(name)!r}, not {value!r}."
                " Use the same settings to go on, or another folder to begin anew."
            )


def _append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _settle(path: Path) -> None:
    """See to it that what was appended is on the disk."""
    with path.open("ab") as file:
        os.fsync(file.fileno())


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that it is there wholly or not at all, even after a power cut."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
