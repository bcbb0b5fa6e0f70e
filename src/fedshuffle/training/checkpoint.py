"""Checkpoints: a state as two files, ``ROUND.safetensors`` and ``ROUND.json`` with a checksum."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedshuffle import _files
from fedshuffle.errors import error_context, one_line
from fedshuffle.state import State

_FORMAT = 2
"""The layout of checkpoints; others are not read."""


def round_of(path: Path) -> int:
    """The round of a checkpoint's file; -1 for any other file."""
    ours = path.suffix in (".json", ".safetensors") and path.stem.isdecimal()
    return int(path.stem) if ours and path.stem == f"{int(path.stem):08d}" else -1


def write(folder: Path, run: str, state: State, clients: Mapping[str, Tensor]) -> None:
    """Write a checkpoint, each file completely or not at all."""
    parts = {
        "direction": state.method_state,
        "server": state.optimiser_state,
        "transforms": state.transform_state,
        "replies": state.replies,
        "in_flight": {str(version): x for version, x in state.in_flight.items()},
        "clients": clients,
    }
    tensors = {f"{part}.{name}": t for part, named in parts.items() for name, t in named.items()}
    tensors["x"] = state.x
    data = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    facts = {"format": _FORMAT, "round": state.round, "run": run, "time": state.time}
    text = json.dumps({**facts, "sha256": _checksum(facts, data)})
    name = folder / f"{state.round:08d}"
    _files.atomic_write(name.with_suffix(".safetensors"), data)
    _files.atomic_write(name.with_suffix(".json"), text.encode())


def read(path: Path, run: str, device: torch.device | str) -> tuple[State, dict[str, Tensor]]:
    """The state of a checkpoint, on a device, and the index of the clients' rows, if any."""
    with error_context(
        lambda error: one_line(error) if type(error) is ValueError else f"{error!r:.80}", Exception
    ):
        facts = json.loads(path.read_text(encoding="utf-8"))
        data = path.with_suffix(".safetensors").read_bytes()
        if facts.pop("sha256") != _checksum(facts, data):
            raise ValueError("its checksum does not fit")
        for name, value in {"format": _FORMAT, "run": run, "round": round_of(path)}.items():
            if facts[name] != value:
                raise ValueError(f"its {name} is {facts[name]!r}, not {value!r}")
        tensors = load(data)
        x = tensors.pop("x").to(device)
    names = "direction", "server", "transforms", "replies", "in_flight", "clients"
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, tensor in tensors.items():
        part, _, name = key.partition(".")
        parts[part][name] = tensor if part == "clients" else tensor.to(device)
    time = facts.get("time", 0.0)  # earlier versions had no clock
    state = State(x, parts["direction"], parts["server"], round_of(path), time=time)
    state = replace(state, transform_state=parts["transforms"], replies=parts["replies"])
    models = {int(version): model for version, model in parts["in_flight"].items()}
    state = replace(state, in_flight=models)
    return state, parts["clients"]


def _checksum(facts: Mapping[str, Any], data: bytes) -> str:
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode() + b"\n" + data).hexdigest()
