"""Checkpoints of two files each: the JSON file is written last, its checksum covers both.

    00000100.safetensors    the model and the method's state
    00000100.json           round, id of the run, and a checksum over all of it

A checkpoint is valid only if its checksum and its file name fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load, save
from torch import Tensor

from fedshuffle import _files
from fedshuffle.errors import FedShuffleError, one_line
from fedshuffle.state import State

_FORMAT = 2
"""The layout of checkpoints; others are refused."""


class Checkpoint(NamedTuple):
    """A state, the id of its run, and the index of the clients' rows in their own file, if any."""

    run: str
    state: State
    clients: dict[str, Tensor]


class DamagedError(Exception):
    """A checkpoint that cannot be read."""


def list_checkpoints(folder: Path) -> list[Path]:
    """The ``.json`` files of all checkpoints, valid or not, by round."""
    paths = (path for path in folder.glob("*.json") if round_of(path) >= 0)
    return sorted(paths, key=round_of)


def round_of(path: Path) -> int:
    """The round of a checkpoint's file; -1 for any other file."""
    ours = path.suffix in (".json", ".safetensors") and path.stem.isdecimal()
    return int(path.stem) if ours and path.stem == f"{int(path.stem):08d}" else -1


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write both files, each completely or not at all."""
    run, state, clients = checkpoint
    parts = {"direction": state.method_state, "server": state.optimiser_state, "clients": clients}
    tensors = {f"{part}.{name}": t for part, named in parts.items() for name, t in named.items()}
    tensors["x"] = state.x
    data = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    facts = {"format": _FORMAT, "round": state.round, "run": run}
    text = json.dumps({**facts, "sha256": _checksum(facts, data)})
    name = folder / f"{state.round:08d}"
    _files.atomic_write(name.with_suffix(".safetensors"), data)
    _files.atomic_write(name.with_suffix(".json"), text.encode())


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint of a ``.json`` file, or why it is damaged."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        data = path.with_suffix(".safetensors").read_bytes()
        if facts.pop("sha256") != _checksum(facts, data):
            raise ValueError("its checksum does not fit")
        run, round, format = facts["run"], facts["round"], facts.get("format")
        if round_of(path) != round:
            raise ValueError(f"it is of round {round}")
        tensors = load(data)
        x = tensors.pop("x")
    except Exception as error:  # of any type: nothing was done with the contents yet
        raise DamagedError(
            one_line(error) if type(error) is ValueError else f"{error!r:.80}"
        ) from error
    if format != _FORMAT:
        raise FedShuffleError(
            f"checkpoint {str(path)!r} has format {format}, and this version of fedshuffle reads"
            f" format {_FORMAT}. Resume with the version that wrote it, or start a new run."
        )
    direction, server, clients = (
        {name.removeprefix(part): t for name, t in tensors.items() if name.startswith(part)}
        for part in ("direction.", "server.", "clients.")
    )
    return Checkpoint(run, State(x, direction, server, round), clients)


def _checksum(facts: Mapping[str, Any], data: bytes) -> str:
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode() + b"\n" + data).hexdigest()
