"""Configs as plain data and as TOML files."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedshuffle import _files
from fedshuffle.config.loader import INTERRUPTIONS
from fedshuffle.config.schema import Config, ImportSpec, ScheduleSpec, StorePath, keys
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.local_optimisers import LocalOptimiser
from fedshuffle.local_work import AtMost, EpochRange, Interruption, MissLast, RandomStop


def plain(value: Any) -> Any:
    """A config or a part of it as plain data that ``loader.read`` understands."""
    match value:
        case ImportSpec(path, arguments):
            return {"use": path, **arguments}
        case StorePath(path, transform):
            return {"store": path} | ({} if transform is None else {"transform": transform})
        case ScheduleSpec(name, arguments):
            return {"schedule": name, **arguments}
        case EpochRange(low, high):
            return f"{low}..{high}"
        case MissLast(number) | AtMost(number) | RandomStop(number):
            names = {kind: name for name, kind in INTERRUPTIONS.items()}
            return f"{names[type(value)]}:{number!r}"
        case Interruption():
            raise FedShuffleError(
                f"work.interruption: {value!r} has no name in a config. Call fedshuffle.train."
            )
        case LocalOptimiser(kind):
            if not isinstance(kind, str):
                raise FedShuffleError(
                    f"work.optimiser: {value} has no name in a config. Call fedshuffle.train."
                )
            return str(value)
        case Path():
            return str(value)
        case tuple():
            return [plain(entry) for entry in value]
    if is_dataclass(value) and not isinstance(value, type):
        found = {name: getattr(value, name) for name in keys(type(value))}
        return {name: plain(entry) for name, entry in found.items() if entry not in (None, ())}
    return value


def toml(tables: Mapping[str, Any]) -> str:
    """Plain data as the text of a TOML file."""
    with error_context(lambda error: f"{error}. Use numbers, texts, lists and tables.", TypeError):
        return tomli_w.dumps(tables)


def save(config: Config, out: Path, notes: Sequence[str]) -> None:
    """Write a config into the folder of its run, complete enough to resume from there."""
    tables = plain(config.pinned()) | {"folder": relative(config.folder, out)}
    tables.pop("out", None)
    head = "".join(f"# {' '.join(note.split())}\n" for note in notes)
    _files.write_file(out / "config.toml", f"{head}\n{toml(tables)}")


def relative(folder: Path, out: Path) -> str:
    """A folder as written into ``out``: relative if ``out`` is below it, so both can be moved."""
    here = out.resolve()
    if not here.is_relative_to(folder):
        return str(folder)
    return Path(os.path.relpath(folder, here)).as_posix()
