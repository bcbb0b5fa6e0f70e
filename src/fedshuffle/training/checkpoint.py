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
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedshuffle import _files
from fedshuffle.errors import one_line
from fedshuffle.state import State

_FORMAT = 2
"""The layout of checkpoints; others are not read."""


class DamagedError(Exception):
    """A checkpoint that cannot be read, or is not one of this run."""


def list_checkpoints(folder: Path) -> list[Path]:
    """The ``.json`` files of all checkpoints, valid or not, by round."""
    paths = (path for path in folder.glob("*.json") if round_of(path) >= 0)
    return sorted(paths, key=round_of)


def round_of(path: Path) -> int:
    """The round of a checkpoint's file; -1 for any other file."""
    ours = path.suffix in (".json", ".safetensors") and path.stem.isdecimal()
    return int(path.stem) if ours and path.stem == f"{int(path.stem):08d}" else -1


def write_checkpoint(folder: Path, run: str, state: State, clients: Mapping[str, Tensor]) -> None:
    """Write both files, each completely or not at all."""
    parts = {"direction": state.method_state, "server": state.optimiser_state, "clients": clients}
    tensors = {f"{part}.{name}": t for part, named in parts.items() for name, t in named.items()}
    tensors["x"] = state.x
    data = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    facts = {"format": _FORMAT, "round": state.round, "run": run}
    text = json.dumps({**facts, "sha256": _checksum(facts, data)})
    name = folder / f"{state.round:08d}"
    _files.atomic_write(name.with_suffix(".safetensors"), data)
    _files.atomic_write(name.with_suffix(".json"), text.encode())


def read_checkpoint(
    path: Path, run: str, device: torch.device | str = "cpu"
) -> tuple[State, dict[str, Tensor]]:
    """The state in a ``.json`` file, on a device, and the index of the clients' rows, if any."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        data = path.with_suffix(".safetensors").read_bytes()
        if facts.pop("sha256") != _checksum(facts, data):
            raise ValueError("its checksum does not fit")
        for name, value in {"format": _FORMAT, "run": run, "round": round_of(path)}.items():
            if facts[name] != value:
                raise ValueError(f"its {name} is {facts[name]!r}, not {value!r}")
        tensors = load(data)
        x = tensors.pop("x").to(device)
    except Exception as error:  # of any type: nothing was done with the contents yet
        known = type(error) is ValueError
        raise DamagedError(one_line(error) if known else f"{error!r:.80}") from error
    parts: dict[str, dict[str, Tensor]] = {"direction": {}, "server": {}, "clients": {}}
    for key, tensor in tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = tensor if part == "clients" else tensor.to(device)
    state = State(x, parts["direction"], parts["server"], round_of(path))
    return state, parts["clients"]


def _checksum(facts: Mapping[str, Any], data: bytes) -> str:
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode() + b"\n" + data).hexdigest()
