"""The folder of a run: its settings, a line of metrics a round, and checkpoints to go on from.

    DIR/run.json                        settings and versions
    DIR/metrics.jsonl                   one line a round
    DIR/checkpoints/00000100.json       round and checksum; written last, so it vouches for
    DIR/checkpoints/00000100.safetensors    the model and all that the server remembers

Every file but the metrics is written under another name and moved into place, so that a run killed
at any moment leaves only whole files. A run that goes on forgets the metrics after its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors.torch import load, save

from fedshuffle.errors import FedShuffleError
from fedshuffle.state import State


@final
class RunFolder:
    """Reads and writes the folder of one run."""

    def __init__(self, path: Path, keep: int = 3) -> None:
        self.path = path
        self.keep = keep
        self._checkpoints = path / "checkpoints"
        self._metrics = path / "metrics.jsonl"

    def begin(self, settings: Mapping[str, Any], resume: bool) -> State | None:
        """Open the folder; the state to go on from, or None at the very start."""
        made = self.path / "run.json"
        if not resume:
            if made.exists():
                raise FedShuffleError(
                    f"{str(self.path)!r} holds a run already. Go on with resume=True, or choose"
                    " another folder."
                )
            self._checked(lambda: self._checkpoints.mkdir(parents=True, exist_ok=True))
            _replace(made, json.dumps({**settings, "versions": versions()}, indent=2).encode())
            self._metrics.write_bytes(b"")
            return None
        if not made.exists():
            raise FedShuffleError(f"{str(self.path)!r} holds no run to go on with.")
        try:
            begun = json.loads(made.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FedShuffleError(f"{str(made)!r} cannot be read: {error}.") from error
        _same_settings(begun, settings, self.path)
        state = self.latest()
        self._forget_after(0 if state is None else state.round)
        return state

    def record(self, line: Mapping[str, Any]) -> None:
        """Add the metrics of a round."""
        text = json.dumps(line) + "\n"
        self._checked(lambda: _append(self._metrics, text))

    def metrics(self) -> list[dict[str, Any]]:
        """All lines so far."""
        lines = self._metrics.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]

    def save(self, state: State) -> None:
        """Write a checkpoint and drop the oldest beyond the number kept."""
        tensors = {"x": state.x} | {f"memory.{k}": v for k, v in state.memory.items()}
        data = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
        name = self._checkpoints / f"{state.round:08d}"
        facts = {"round": state.round, "sha256": hashlib.sha256(data).hexdigest()}

        def write() -> None:
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

    def _checked(self, write: Any) -> None:
        try:
            write()
        except OSError as error:
            raise FedShuffleError(
                f"cannot write to {str(self.path)!r}: {error.strerror}. What was saved before is"
                " whole; make room or choose another folder, and go on with resume=True."
            ) from error


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


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that it is there wholly or not at all, even after a power cut."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
