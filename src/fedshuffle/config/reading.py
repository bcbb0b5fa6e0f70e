"""Reading a config file strictly: what is not understood is named, before any work."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedshuffle import _synonyms, schedules
from fedshuffle._arrays import count
from fedshuffle.config import imports
from fedshuffle.config.settings import (
    Checkpoints,
    Config,
    Evaluating,
    Scheduled,
    Store,
    Use,
    at,
)
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.local_work import (
    AtMost,
    EpochRange,
    Interruption,
    LocalWork,
    MissLast,
    RandomStop,
)

Reader = Callable[[Any, str], Any]
"""Turns what stands in the file at a key into what the config holds, or names the key."""


def load(path: Path | str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The config in a file, with other values at some dotted keys (``work.batch_size``)."""
    file, changes = Path(path), overrides or {}
    found = tables(file)
    said = "".join(f" with {key}={value}" for key, value in changes.items())
    with at(f"{file}{said}"):
        config = read(override(found, changes), file.parent)
    return replace(config, origin=(f"From {file.name}{said}.",))


def tables(file: Path) -> dict[str, Any]:
    """What stands in a TOML file, as plain data."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise FedShuffleError(f"there is no config {str(file)!r}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FedShuffleError(f"the config {str(file)!r} cannot be read: {error}.") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FedShuffleError(f"{file}: {_broken(error, text)}") from error


def setting(text: str) -> tuple[str, Any]:
    """A key and its value from ``key=value``; the value as in TOML, or else as text.

    >>> setting("work.batch_size=16"), setting("method=fedavg"), setting("work.epochs=2..5")
    (('work.batch_size', 16), ('method', 'fedavg'), ('work.epochs', '2..5'))
    """
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not (key and equals and value):
        raise FedShuffleError(f"{text!r} sets nothing: write it like work.batch_size=16.")
    try:
        table = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key, value
    return key, table["value"] if len(table) == 1 else value


def override(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data with other values at dotted keys."""
    result: dict[str, Any] = copy.deepcopy(dict(tables))
    for key, value in changes.items():
        *path, last = key.split(".")
        table = result
        for name in path:
            inner = table.get(name, {})
            if isinstance(inner, str) and name in ("model", "loss", "data"):
                inner = {"use": inner}
            if not isinstance(inner, dict):
                raise FedShuffleError(f"{key} cannot be set, since {name} is {inner!r}, no table.")
            table[name] = inner
            table = inner
        table[last] = value
    return result


def read(tables: Mapping[str, Any], folder: Path) -> Config:
    """The config that plain data describes; its paths start from the folder."""
    values = _table(tables, "", _TOP)
    for key, remedy in _NEEDED.items():
        if key not in values:
            raise FedShuffleError(f"{key} is missing: add {remedy}.")
    home = (folder / values.get("folder", ".")).resolve()
    if not home.is_dir():
        raise FedShuffleError(
            f"folder: there is no folder {str(home)!r}. Say where the config's modules and data"
            " lie now."
        )
    if "out" in values:
        values["out"] = home / values["out"]
    return Config(**values | {"folder": home})


# What may stand in the file ---------------------------------------------------------------------


def _table(value: Any, key: str, readers: Mapping[str, Reader]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise FedShuffleError(
            f"{key} is {value!r}, but must be a table: write [{key}] and its keys below."
        )
    for name in value:
        if name not in readers:
            raise _unknown_key(key, name, readers)
    return {name: readers[name](entry, _join(key, name)) for name, entry in value.items()}


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise FedShuffleError(f"{key} is {value!r}, but must be a text in quotes.")
    return value


def _whole(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FedShuffleError(f"{key} is {value!r}, but must be a whole number.")
    return value


def _count(value: Any, key: str) -> int:
    return count(value, key)


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FedShuffleError(f"{key} is {value!r}, but must be a number.")
    return value


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise FedShuffleError(f"{key} is {value!r}, but must be true or false.")
    return value


def _import_path(value: Any, key: str) -> str:
    path = _text(value, key)
    with at(key):
        imports.split(path)
    return path


def _size(value: Any, key: str) -> float | Scheduled:
    if isinstance(value, str):
        with at(key):
            return Scheduled(*schedules.read(value))
    if not isinstance(value, Mapping):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FedShuffleError(
                f'{key} is {value!r}, but must be a number, or a schedule, such as "cosine:0.1".'
            )
        return value
    if "schedule" not in value:
        raise FedShuffleError(f'{key}.schedule is missing: name one, such as "inverse_time".')
    arguments = {name: entry for name, entry in value.items() if name != "schedule"}
    return Scheduled(_text(value["schedule"], f"{key}.schedule"), arguments)


def _use(value: Any, key: str) -> Use:
    """A text is short for a table with only that path."""
    if isinstance(value, str):
        return Use(_import_path(value, key))
    if not isinstance(value, Mapping) or "use" not in value:
        raise FedShuffleError(
            f'{key}.use is missing: name what to use, such as use = "module:function".'
        )
    arguments = {name: entry for name, entry in value.items() if name != "use"}
    return Use(_import_path(value["use"], f"{key}.use"), arguments)


def _loss(value: Any, key: str) -> Use:
    named = value.get("use") if isinstance(value, Mapping) else value
    if isinstance(named, str) and ":" not in named:  # one of fedshuffle.losses
        arguments = {k: v for k, v in value.items() if k != "use"} if value is not named else {}
        return Use(_text(named, key), arguments)
    return _use(value, key)


def _data(value: Any, key: str) -> Use | Store:
    if isinstance(value, Mapping) and "store" in value:
        if "use" in value:
            raise FedShuffleError(f"{key} has both use and store: give one of them.")
        return Store(_table(value, key, {"store": _text})["store"])
    if isinstance(value, Mapping) and "use" not in value:
        raise FedShuffleError(
            f'{key} says nothing: give {key}.use = "module:function", or {key}.store = "folder".'
        )
    return _use(value, key)


def _work(value: Any, key: str) -> LocalWork:
    fields = _table(value, key, _WORK)
    for name, entry in fields.items():
        with at(_join(key, name)):
            LocalWork(**{name: entry})
    return LocalWork(**fields)


def _epochs(value: Any, key: str) -> int | tuple[int, ...] | EpochRange:
    if isinstance(value, str):
        limits = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", value)
        if limits is None:
            raise FedShuffleError(f'{key} is {value!r}, but a range is written like "2..5".')
        with at(key):
            return EpochRange(int(limits[1]), int(limits[2]))
    if isinstance(value, list | tuple):
        return tuple(_whole(entry, key) for entry in value)
    return _count(value, key)


def _steps(value: Any, key: str) -> Any:
    return value if isinstance(value, str) else _count(value, key)


def _interruption(value: Any, key: str) -> Interruption:
    name, _, argument = _text(value, key).partition(":")
    if name not in _INTERRUPTIONS:
        with at(key):
            raise unknown("interruption", name, (form for form, _ in _INTERRUPTIONS.values()))
    form, make = _INTERRUPTIONS[name]
    with at(key):
        try:
            return make(argument)
        except FedShuffleError:
            raise
        except ValueError as error:
            raise FedShuffleError(f"{value!r} cannot be read: write {form!r}.") from error


_INTERRUPTIONS: dict[str, tuple[str, Callable[[str], Interruption]]] = {
    "miss-last": ("miss-last:STEPS", lambda text: MissLast(int(text))),
    "at-most": ("at-most:STEPS", lambda text: AtMost(int(text))),
    "random-stop": ("random-stop:PROBABILITY", lambda text: RandomStop(float(text))),
}


def _evaluation(value: Any, key: str) -> Evaluating:
    fields = _table(value, key, _EVALUATION)
    if "data" not in fields:
        raise FedShuffleError(
            f'{key}.data is missing: give held-out data as in [data], or data = "training".'
        )
    return Evaluating(**fields)


def _evaluation_data(value: Any, key: str) -> Any:
    return value if value == "training" else _data(value, key)


def _metrics(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise FedShuffleError(f'{key} is {value!r}, but must be a list, such as ["accuracy"].')
    return tuple(_text(entry, key) for entry in value)


def _checkpoints(value: Any, key: str) -> Checkpoints:
    return Checkpoints(**_table(value, key, _CHECKPOINTS))


_WORK: dict[str, Reader] = {
    "epochs": _epochs,
    "steps": _steps,
    "batch_size": _count,
    "order": _text,
    "interruption": _interruption,
    "clip": _number,
    "weight_decay": _number,
}
_EVALUATION: dict[str, Reader] = {
    "data": _evaluation_data,
    "metrics": _metrics,
    "every": _count,
    "per_client": _flag,
    "batch_size": _count,
    "clients": _count,
    "training": _count,
}
_CHECKPOINTS: dict[str, Reader] = {"every": _count, "keep": _count}
_TOP: dict[str, Reader] = {
    "rounds": _count,
    "seed": _whole,
    "method": _text,
    "momentum": _text,
    "sampling": _text,
    "step_size": _size,
    "server_step_size": _size,
    "engine": _text,
    "device": _text,
    "tensorboard": _flag,
    "out": _text,
    "folder": _text,
    "model": _use,
    "loss": _loss,
    "data": _data,
    "work": _work,
    "evaluation": _evaluation,
    "checkpoints": _checkpoints,
}
_SECTIONS = {"": _TOP, "work": _WORK, "evaluation": _EVALUATION, "checkpoints": _CHECKPOINTS}
_NEEDED = {
    "rounds": "how many rounds to train, such as rounds = 100",
    "model": 'a section [model] with use = "module:function"',
    "loss": 'loss = "cross_entropy", another of fedshuffle.losses, or an import path',
    "data": 'a section [data] with use = "module:function" or store = "folder"',
}


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _unknown_key(key: str, name: str, known: Mapping[str, Reader]) -> FedShuffleError:
    """The error for a key that does not exist; often it exists, but in another section."""
    if not key and name in ("compare", "scale"):
        return FedShuffleError(
            f"[{name}] belongs to a comparison, and this command runs one method. Run: fedshuffle"
            " compare FILE."
        )
    homes = [section for section, readers in _SECTIONS.items() if name in readers]
    hint = ""
    if homes:
        places = [f"below [{home}]" if home else "above the first [section]" for home in homes]
        hint = f" It stands {' or '.join(places)}."
    elif near := _synonyms.nearest(name, known):
        hint = f" Did you mean {_join(key, near)!r}?"
    elif place := key_for(name):
        hint = f" Did you mean {place!r}?"
    return FedShuffleError(
        f"unknown key {_join(key, name)!r}.{hint} Known: {', '.join(sorted(known))}."
    )


def key_for(word: str) -> str | None:
    """The dotted key that somebody may mean by a word.

    >>> key_for("lr"), key_for("batch_size"), key_for("spam")
    ('step_size', 'work.batch_size', None)
    """
    for section, readers in _SECTIONS.items():
        if word in readers:
            return _join(section, word)
    for section, readers in _SECTIONS.items():
        if near := _synonyms.nearest(word, readers):
            return _join(section, near)
    return None


def _broken(error: tomllib.TOMLDecodeError, text: str) -> str:
    """What is wrong with a file that is no TOML, with the line at fault."""
    place = re.search(r"at line (\d+)", str(error))
    line = f": {text.split(chr(10))[int(place[1]) - 1].strip()!r:.80}" if place else ""
    return f"broken TOML: {error}{line}. Texts stand in quotes, lists in brackets."
