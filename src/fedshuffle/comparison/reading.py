"""Reading a comparison's file: a run's config with a section [compare], as strict as that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshuffle.comparison.settings import CLIENTS, Comparison, Tuning, settings
from fedshuffle.config import Config, Scheduled, reading
from fedshuffle.config.reading import Reader
from fedshuffle.config.settings import at
from fedshuffle.config.writing import toml
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.randomness import check_seed


def load(
    path: Path | str, overrides: Mapping[str, Any] | None = None, scale: str | None = None
) -> Comparison:
    """The comparison in a file.

    Args:
        path: the file.
        overrides: other values at some dotted keys (``work.batch_size``, ``compare.seeds``).
        scale: the name of a section ``[scale.NAME]``, whose keys come before those of the file.
    """
    file, changes = Path(path), overrides or {}
    tables = reading.tables(file)
    said = "".join(f" with {key}={value}" for key, value in changes.items())
    with at(f"{file}{said}"):
        scaled = _scaled(tables, scale)
        changed = reading.override(scaled, changes)
        text = toml(changed) if changes or scaled != tables else _text(file)
        return read(changed, file.parent, text)


def read(tables: Mapping[str, Any], folder: Path, text: str = "") -> Comparison:
    """The comparison that plain data describes; its paths start from the folder."""
    if "compare" not in tables:
        raise FedShuffleError(
            'the section [compare] is missing: add it with methods = ["fedavg", "fedshuffle"].'
            " To train one method, run: fedshuffle run FILE."
        )
    base = reading.read({k: v for k, v in tables.items() if k != "compare"}, folder)
    found = reading._table(tables["compare"], "compare", _COMPARE)
    if "methods" not in found:
        raise FedShuffleError('compare.methods is missing: name them, as ["fedavg-rr", ...].')
    seeds = found.get("seeds", (base.seed,))
    sizes = found.get("step_sizes", ())
    common = found.get("common_step_sizes", ())
    varied = [name for name in ("weight_decay", "clip") if name in found]
    if not sizes and (varied or not common):
        size = base.step_size
        sizes = (size.arguments["step_size"] if isinstance(size, Scheduled) else size,)
    return Comparison(
        base,
        found["methods"],
        found.get("momentum", (base.momentum,)),
        seeds,
        settings(base, sizes, found.get("weight_decay", ()), found.get("clip", ())),
        common,
        _tuning(found.get("tune", {}), base, seeds[0]),
        found.get("metric"),
        found.get("title", "Comparison"),
        text,
        dict(tables),
    )


def _tuning(found: Mapping[str, Any], base: Config, seed: int) -> Tuning:
    rounds = found.get("rounds", max(1, base.rounds // 5))
    clients = CLIENTS if found.get("data", "training") == "training" else None
    given = {"rounds": rounds, "seed": seed, "clients": clients, "every": max(1, rounds // 10)}
    return Tuning(**{**given, **found})


def _scaled(tables: Mapping[str, Any], scale: str | None) -> dict[str, Any]:
    """The tables without the scales, but with the keys of one."""
    rest = {key: value for key, value in tables.items() if key != "scale"}
    scales = tables.get("scale", {})
    if not isinstance(scales, Mapping) or not all(isinstance(s, Mapping) for s in scales.values()):
        raise FedShuffleError("scale must hold tables: write [scale.NAME] and its keys below.")
    if scale is None:
        return rest
    if scale not in scales:
        raise unknown("scale", scale, scales)
    return merged(rest, scales[scale])


def merged(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with the keys of others, which come first.

    >>> merged({"work": {"epochs": 2, "clip": 5}}, {"work": {"epochs": 1}})
    {'work': {'epochs': 1, 'clip': 5}}
    """
    result = dict(tables)
    for key, value in changes.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8-sig")


# What may stand in the section -------------------------------------------------------------------


def _list(reader: Reader) -> Reader:
    def read(value: Any, key: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not value:
            raise FedShuffleError(f"{key} is {value!r}, but must be a list with something in it.")
        found = tuple(reader(entry, key) for entry in value)
        twice = [entry for k, entry in enumerate(found) if entry in found[:k]]
        if twice:
            raise FedShuffleError(f"{key} names {twice[0]!r} twice: drop one of them.")
        return found

    return read


def _seed(value: Any, key: str) -> int:
    with at(key):
        return check_seed(reading._whole(value, "the seed"))


def _clip(value: Any, key: str) -> float:
    return math.inf if value == "none" else reading._number(value, key)


def _tune(value: Any, key: str) -> dict[str, Any]:
    return reading._table(value, key, _TUNE)


_TUNE: dict[str, Reader] = {
    "rounds": reading._count,
    "seed": _seed,
    "metric": reading._text,
    "data": reading._evaluation_data,
    "clients": reading._count,
    "every": reading._count,
    "widen": reading._number,
}
_COMPARE: dict[str, Reader] = {
    "title": reading._text,
    "methods": _list(reading._text),
    "momentum": _list(reading._text),
    "seeds": _list(_seed),
    "step_sizes": _list(reading._number),
    "common_step_sizes": _list(reading._number),
    "weight_decay": _list(reading._number),
    "clip": _list(_clip),
    "metric": reading._text,
    "tune": _tune,
}
