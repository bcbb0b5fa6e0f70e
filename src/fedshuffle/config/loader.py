"""Config files: read strictly, by the types of :mod:`fedshuffle.config.schema`."""

import copy
import dataclasses
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from fedshuffle import schedules
from fedshuffle._arrays import count
from fedshuffle.config.schema import (
    Config,
    DataSpec,
    ImportSpec,
    ScheduleSpec,
    StepSize,
    StorePath,
    at,
    keys,
    without_none,
)
from fedshuffle.errors import FedShuffleError, error_context, nearest_name, unknown
from fedshuffle.local_optimisers import LocalOptimiser
from fedshuffle.local_work import AtMost, EpochRange, Interruption, MissLast, RandomStop


def load(path: Path | str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The config in a file, with other values at some dotted keys (``work.batch_size``).

    Args:
        path: the file.
        overrides: other values, by dotted key.

    >>> from tempfile import TemporaryDirectory
    >>> text = '''
    ... rounds = 3
    ... model = "mine:network"
    ... loss = "cross_entropy"
    ... data = "mine:clients"
    ... '''
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder, "config.toml")
    ...     _ = file.write_text(text)
    ...     config = load(file, {"work.batch_size": 16})
    >>> config.rounds, config.work.batch_size
    (3, 16)
    """
    file, changes = Path(path), overrides or {}
    tables = parse(file)
    with at(described(file, changes)):
        config = read(override(tables, changes), file.parent)
    return replace(config, origin=(f"From {described(Path(file.name), changes)}.",))


def described(file: Path, changes: Mapping[str, Any]) -> str:
    """A file and the overrides of its keys, for messages."""
    return f"{file}" + "".join(f" with {key}={value}" for key, value in changes.items())


def parse(file: Path) -> dict[str, Any]:
    """The tables of a TOML file, as plain data."""
    if not file.exists():
        raise FedShuffleError(f"there is no config {str(file)!r}.")
    unreadable = f"the config {str(file)!r} cannot be read"
    with error_context(lambda error: f"{unreadable}: {error}.", (OSError, UnicodeDecodeError)):
        text = file.read_text(encoding="utf-8-sig")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = f": {text.split(chr(10))[int(place[1]) - 1].strip()!r:.80}" if place else ""
        raise FedShuffleError(
            f"{file}: broken TOML: {error}{line}. Put texts in quotes, lists in brackets."
        ) from error


def setting(text: str) -> tuple[str, Any]:
    """A key and its value from ``key=value``; the value is TOML, or else text.

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
            if isinstance(inner, str):  # short for a table with only that path
                inner = {"use": inner}
            if not isinstance(inner, dict):
                raise FedShuffleError(f"{key} cannot be set: {name} is {inner!r}, not a table.")
            table[name] = inner
            table = inner
        table[last] = value
    return result


def read(tables: Mapping[str, Any], folder: Path) -> Config:
    """The config that plain data describes; paths are relative to the folder."""
    values = read_fields(Config, tables, "")
    home = (folder / values.get("folder", ".")).resolve()
    if not home.is_dir():
        raise FedShuffleError(
            f"folder: there is no folder {str(home)!r}. Write where the config's modules and data"
            " are now."
        )
    if "out" in values:
        values["out"] = home / values["out"]
    return Config(**values | {"folder": home})


# Reading by type ----------------------------------------------------------------------------------


def read_fields(kind: Any, value: Any, key: str) -> dict[str, Any]:
    """The fields of a dataclass that a table of the file gives; refuses unknown keys."""
    if not isinstance(value, Mapping):
        raise FedShuffleError(
            f"{key} is {value!r}, but must be a table: write [{key}] and its keys below."
        )
    known = keys(kind)
    for name in value:
        if name not in known:
            raise _unknown_key(key, name, known)
    for field in dataclasses.fields(kind):
        if "add" in field.metadata and field.name not in value:
            place = _join(key, field.name)
            raise FedShuffleError(f"{place} is missing: add {field.metadata['add']}.")
    return {name: _read(known[name], entry, _join(key, name)) for name, entry in value.items()}


def _read(kind: Any, value: Any, key: str) -> Any:
    """The value of a field of this type."""
    if kind in _READERS:
        return _READERS[kind](value, key)
    if hasattr(kind, "__metadata__"):  # Annotated[type, reader]
        return kind.__metadata__[0](value, key)
    if get_origin(kind) is Literal:  # which texts, the dataclass checks
        return read_text(value, key)
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple) or not value:
            raise FedShuffleError(f"{key} is {value!r}, but must be a list with entries.")
        return tuple(_read(without_none(get_args(kind)[0]), entry, key) for entry in value)
    fields = read_fields(kind, value, key)
    with at(key):
        return kind(**fields)


def _of_type(kinds: type | tuple[type, ...], words: str) -> Callable[[Any, str], Any]:
    def read(value: Any, key: str) -> Any:
        empty = isinstance(value, str) and not value.strip()
        if not isinstance(value, kinds) or empty or (isinstance(value, bool) and kinds is not bool):
            raise FedShuffleError(f"{key} is {value!r}, but must be {words}.")
        return value

    return read


read_text = _of_type(str, "a text in quotes")
_whole = _of_type(int, "a whole number")
read_number = _of_type((int, float), "a number")
_number_or_schedule = _of_type((int, float), 'a number, or a schedule, such as "cosine:0.1"')


_EXAMPLES = {"use": "module:function", "store": "folder", "schedule": "inverse_time"}


def _spec(kinds: Mapping[str, Callable[..., Any]]) -> Callable[[Any, str], Any]:
    """Reads a table in which one of these keys names an object; the others are its arguments."""

    def read(value: Any, key: str) -> Any:
        table = {"use": value} if isinstance(value, str) else value
        given = [word for word in kinds if isinstance(table, Mapping) and word in table]
        if len(given) != 1:
            choices = " or ".join(f'{key}.{word} = "{_EXAMPLES[word]}"' for word in kinds)
            raise FedShuffleError(f"{key} needs one name: write {choices}.")
        (word,) = given
        arguments = {name: entry for name, entry in table.items() if name != word}
        name = read_text(table[word], f"{key}.{word}")
        if word == "store":
            return _store(name, arguments, key)
        return kinds[word](name, arguments) if arguments else kinds[word](name)

    return read


def _store(path: str, options: Mapping[str, Any], key: str) -> StorePath:
    known = {"store": str, "transform": str}
    for name in options:
        if name not in known:
            raise _unknown_key(key, name, known)
    return StorePath(path, **{k: read_text(v, f"{key}.{k}") for k, v in options.items()})


_data = _spec({"use": ImportSpec, "store": StorePath})
_schedule = _spec({"schedule": ScheduleSpec})


def _step_size(value: Any, key: str) -> Any:
    if isinstance(value, str):
        with at(key):
            return ScheduleSpec(*schedules.parse(value))
    if isinstance(value, Mapping):
        return _schedule(value, key)
    return _number_or_schedule(value, key)


def epochs(value: Any, key: str) -> int | tuple[int, ...] | EpochRange:
    """A number, a number per client, or a range such as ``"2..5"``; also as texts."""
    if isinstance(value, str):
        if not re.fullmatch(r"\d+(\.\.\d+|(,\d+)*)", value.replace(" ", "")):
            raise FedShuffleError(
                f"{key} is {value!r}: write 2 for all, 1,2,3 per client, or 2..5 at random."
            )
        numbers = tuple(map(int, re.split(r"\.\.|,", value)))
        if ".." not in value:
            return numbers if len(numbers) > 1 else numbers[0]
        with at(key):
            return EpochRange(*numbers)
    if isinstance(value, list | tuple):
        return tuple(_whole(entry, key) for entry in value)
    return count(value, key)


INTERRUPTIONS: dict[str, type[Any]] = {
    "miss-last": MissLast,
    "at-most": AtMost,
    "random-stop": RandomStop,
}
"""Each has one field: ``at-most:STEPS``."""


def _interruption(value: Any, key: str) -> Interruption:
    name, _, argument = read_text(value, key).partition(":")
    forms = {n: f"{n}:{dataclasses.fields(k)[0].name.upper()}" for n, k in INTERRUPTIONS.items()}
    with at(key):
        if name not in forms:
            raise unknown("interruption", name, forms.values())
        try:
            number = int(argument) if argument.isdecimal() else float(argument)
        except ValueError as error:
            raise FedShuffleError(f"{value!r} cannot be read: write {forms[name]!r}.") from error
        interruption: Interruption = INTERRUPTIONS[name](number)
        return interruption


def _optimiser(value: Any, key: str) -> LocalOptimiser:
    text = read_text(value, key)
    with at(key):
        return LocalOptimiser.read(text)


_READERS: dict[Any, Callable[[Any, str], Any]] = {
    str: read_text,
    Path: read_text,
    int: _whole,
    float: read_number,
    bool: _of_type(bool, "true or false"),
    ImportSpec: _spec({"use": ImportSpec}),
    DataSpec: _data,
    DataSpec | Literal["training"]: lambda v, key: v if v == "training" else _data(v, key),
    StepSize: _step_size,
    # The types of LocalWork.
    int | Sequence[int] | EpochRange: epochs,
    int | Literal["min", "mean"]: lambda v, key: v if isinstance(v, str) else count(v, key),
    Interruption: _interruption,
    LocalOptimiser | str | type: _optimiser,
}
"""Each turns the value at a key of the file into the value of a field, or raises an error."""

_FORMS: dict[Any, str] = {
    str: "text",
    Path: "path",
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    ImportSpec: 'section with `use = "module:function"`',
    DataSpec: "section with `use` or `store`",
    DataSpec | Literal["training"]: '`"training"`, or a section with `use` or `store`',
    StepSize: 'number or schedule: `"cosine:0.1"`',
    int | Sequence[int] | EpochRange: 'whole number, `"2..5"` at random, or a list: one per client',
    int | Literal["min", "mean"]: 'whole number, `"min"` or `"mean"`',
    Interruption: '`"at-most:20"`, `"miss-last:1"` or `"random-stop:0.2"`',
    LocalOptimiser | str | type: '`"sgd:momentum=0.9"`, `"adamw"` or another of `torch.optim`',
}
"""How a value of each type is written in a file, for the reference."""


def form(kind: Any) -> str:
    """How a value of this type is written in a file, in Markdown.

    >>> form(tuple[str, ...]), form(bool)
    ('list: text', '`true` or `false`')
    """
    if kind in _FORMS:
        return _FORMS[kind]
    if hasattr(kind, "__metadata__"):  # Annotated[type, reader]
        return form(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return f"list: {form(without_none(get_args(kind)[0]))}"
    if get_origin(kind) is Literal:
        return " or ".join(f'`"{text}"`' for text in get_args(kind))
    if isinstance(kind, UnionType):
        return " or ".join("table" if is_dataclass(x) else form(x) for x in get_args(kind))
    return "section"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def sections_of(kind: Any, section: str = "") -> dict[str, Any]:
    """The dataclasses of a config by the names of their sections, the outer ones first."""
    found = {section: kind}
    for name, inner in keys(kind).items():
        if inner not in _READERS and is_dataclass(inner):
            found |= sections_of(inner, _join(section, name))
    return found


_SECTIONS = {section: keys(kind) for section, kind in sections_of(Config).items()}
"""All keys of a config file, by section."""


def _unknown_key(key: str, name: str, known: Mapping[str, Any]) -> FedShuffleError:
    """The error for a key that does not exist; it may exist in another section."""
    if not key and name in ("compare", "scale"):
        return FedShuffleError(
            f"[{name}] belongs to a comparison, and this command runs one method. Run: fedshuffle"
            " compare FILE."
        )
    places = [f"below [{s}]" if s else "above the first [section]" for s in _sections(name)]
    hint = f" It belongs {' or '.join(places)}." if places else ""
    near = nearest_name(name, known)
    if not places and (meant := _join(key, near) if near else key_for(name)):
        hint = f" Did you mean {meant!r}?"
    return FedShuffleError(
        f"unknown key {_join(key, name)!r}.{hint} Known: {', '.join(sorted(known))}."
    )


def _sections(name: str) -> list[str]:
    return [section for section, names in _SECTIONS.items() if name in names]


def key_for(word: str) -> str | None:
    """The dotted key that a user may mean by a word."""
    for section in _sections(word):
        return _join(section, word)
    near = {section: nearest_name(word, names) for section, names in _SECTIONS.items()}
    return next((_join(section, name) for section, name in near.items() if name), None)
