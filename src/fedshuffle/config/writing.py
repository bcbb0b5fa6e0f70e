"""A config as a file: plain data, and plain data as TOML."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshuffle import _files
from fedshuffle.config.settings import Config, Scheduled, Store, Use
from fedshuffle.errors import FedShuffleError
from fedshuffle.local_work import (
    AtMost,
    EpochRange,
    Interruption,
    LocalWork,
    MissLast,
    RandomStop,
)


def plain(config: Config) -> dict[str, Any]:
    """A config as the tables of its file; :func:`fedshuffle.config.reading.read` reads them."""
    tables: dict[str, Any] = {
        "rounds": config.rounds,
        "seed": config.seed,
        "method": config.method,
        "momentum": config.momentum,
        "sampling": config.sampling,
        "step_size": _size(config.step_size),
        "server_step_size": _size(config.server_step_size),
        "engine": config.engine,
        "device": config.device,
        "tensorboard": config.tensorboard,
        "out": None if config.out is None else str(config.out),
        "folder": str(config.folder),
        "model": _source(config.model),
        "loss": _source(config.loss),
        "data": _source(config.data),
        "work": _work(config.work),
        "checkpoints": vars(config.checkpoints),
    }
    if config.evaluation is not None:
        data = config.evaluation.data
        source = data if isinstance(data, str) else _source(data)
        tables["evaluation"] = _without_none(vars(config.evaluation) | {"data": source})
    return _without_none(tables)


def toml(tables: Mapping[str, Any]) -> str:
    """Plain data as the text of a TOML file.

    >>> print(toml({"rounds": 3, "work": {"epochs": "2..5"}}), end="")
    rounds = 3
    <BLANKLINE>
    [work]
    epochs = "2..5"
    """
    lines = [
        f"{_key(key)} = {_value(value)}"
        for key, value in tables.items()
        if not isinstance(value, Mapping)
    ]
    for key, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_key(key)}]"]
            lines += [f"{_key(name)} = {_value(value)}" for name, value in table.items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def copy(config: Config, out: Path, notes: list[str]) -> None:
    """Write the config into the folder of its run, with all that is needed to go on from there."""
    tables = plain(config.pinned())
    tables.pop("out", None)
    here = out.resolve()
    if here.is_relative_to(config.folder):  # so that the two can be moved together
        tables["folder"] = Path(os.path.relpath(config.folder, here)).as_posix()
    head = "".join(f"# {' '.join(note.split())}\n" for note in notes)
    write(out / "config.toml", f"{head}\n{toml(tables)}".encode())


def write(path: Path, data: bytes) -> None:
    """Write a file so that it is there wholly or not at all; its folder is made if need be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _files.replace(path, data)
    except OSError as error:
        raise FedShuffleError(
            f"cannot write {str(path)!r}: {error.strerror}. Make room, or choose another folder."
        ) from error


def _size(size: float | Scheduled) -> Any:
    return {"schedule": size.name, **size.arguments} if isinstance(size, Scheduled) else size


def _source(source: Use | Store) -> dict[str, Any]:
    if isinstance(source, Store):
        return {"store": source.path}
    return {"use": source.path, **source.arguments}


def _work(work: LocalWork) -> dict[str, Any]:
    epochs = work.epochs
    if isinstance(epochs, EpochRange):
        epochs = f"{epochs.low}..{epochs.high}"  # type: ignore[assignment]
    named = {"epochs": epochs, "interruption": _interruption(work.interruption)}
    return _without_none(vars(work) | named)


def _interruption(interruption: Interruption | None) -> str | None:
    match interruption:
        case None:
            return None
        case MissLast(steps):
            return f"miss-last:{steps}"
        case AtMost(steps):
            return f"at-most:{steps}"
        case RandomStop(probability):
            return f"random-stop:{probability!r}"
    raise FedShuffleError(
        f"work.interruption: {interruption!r} has no name in a config. Call fedshuffle.train."
    )


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no word for nothing: such keys are left out."""
    return {key: value for key, value in table.items() if value is not None}


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case int():
            return int.__repr__(value)
        case float():
            return float.__repr__(value)
        case datetime.date() | datetime.time():
            return value.isoformat()
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case Mapping():
            inside = ", ".join(f"{_key(key)} = {_value(entry)}" for key, entry in value.items())
            return f"{{{inside}}}"
    raise FedShuffleError(
        f"{value!r:.60} cannot be written into a config: use numbers, texts, lists and tables."
    )
