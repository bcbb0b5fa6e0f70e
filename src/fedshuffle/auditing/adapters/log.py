"""A recorded log of rounds, from any system: who took part, and with which weight.

A log is a CSV file with a header, or JSONL with one object per line, one line for every client of
every round: ``round, client, size, steps, weight`` and, if step sizes differ, ``step_size``. The
weight is the number by which the server multiplied the client's update.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import number, positive
from fedshuffle.auditing.estimation import Observations, estimate
from fedshuffle.auditing.properties import ServerProperties, describe_weights, uneven
from fedshuffle.auditing.result import Audit, blackbox_result
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.federation import Federation

_NEEDED = ("round", "client", "size", "steps", "weight")


class _Row(NamedTuple):
    line: int
    round: str
    client: str
    size: int
    steps: int
    weight: float
    step_size: float


def read_log(
    path: str | Path, *, weights: ArrayLike | None = None, confidence: float = 0.95
) -> tuple[Audit, Federation]:
    """The objective that the system of a log really minimises, and its clients.

    The clients are those of the log, ordered by their ids; ``weights`` are those of the objective
    that was meant, in that order, by size if not given. Rounds are assumed to be independent draws;
    empty rounds are not in the log, and make no difference.
    """
    number(confidence, "confidence", within="(0, 1)")
    path = Path(path)
    rows = [_row(f"{path}, line {line}", line, record) for line, record in _records(path)]
    if not rows:
        raise FedShuffleError(f"{path}: the log has no rounds.")
    size_of = _sizes(path, rows)
    # By number if all ids are numbers (int() refuses very long ones), else by text.
    numbers = all(id.isdecimal() and len(id) < 1000 for id in size_of)
    ids = sorted(sorted(size_of), key=int) if numbers else sorted(size_of)
    if weights is not None:
        what = f"weights (one for each client of the log: {ids[0]}, ...)"
        weights = positive(weights, len(ids), what)
    federation = Federation.from_sizes(np.array([size_of[id] for id in ids]), weights)
    federation = dataclasses.replace(federation, ids=tuple(ids))

    place = {id: i for i, id in enumerate(ids)}
    names = {name: k for k, name in enumerate(dict.fromkeys(row.round for row in rows))}
    rows.sort(key=lambda row: names[row.round])
    cohort = np.array([names[row.round] for row in rows])
    client = np.array([place[row.client] for row in rows])
    steps, weight, step_size = (
        np.array([getattr(row, name) for row in rows]) for name in ("steps", "weight", "step_size")
    )
    taken = np.bincount(client, minlength=len(ids)) / len(names)
    counted = ServerProperties(rounds=len(names))
    observations = Observations(cohort, client, weight * steps * step_size, len(names))
    audit = blackbox_result(
        estimate(observations, federation.weights, None),
        describe_weights(counted, federation, taken, cohort, client, weight, steps),
        federation,
        taken,
        (int(steps.min()), int(steps.max())) if uneven(steps * step_size) else None,
        confidence,
        name=path.name,
        source=f"a log of {len(names)} rounds",
        how=f"{len(rows)} updates in {len(names)} rounds",
    )
    return audit, federation


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The records of a log with their line numbers."""
    unreadable = (OSError, UnicodeDecodeError)
    with error_context(lambda error: f"cannot read the log {str(path)!r}: {error}.", unreadable):
        text = path.read_text(encoding="utf-8-sig")
    if path.suffix in (".jsonl", ".ndjson") or text.lstrip().startswith("{"):
        yield from _json_records(path, text)
        return
    reader = csv.reader(text.splitlines())
    header: list[str] = []
    with error_context(lambda error: f"{path}, line {reader.line_num}: {error}.", csv.Error):
        for words in reader:
            words = [word.strip() for word in words]
            where = f"{path}, line {reader.line_num}"
            if not any(words):
                continue
            if not header:
                header = words
                _check_columns(where, header)
            elif len(words) != len(header):
                columns = f"but the header has {len(header)} columns"
                raise FedShuffleError(f"{where}: {len(words)} entries, {columns}.")
            else:
                yield reader.line_num, dict(zip(header, words, strict=True))


def _json_records(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, words in enumerate(text.splitlines(), 1):
        where = f"{path}, line {line}: "
        if not words.strip():
            continue
        bad = (ValueError, RecursionError)  # also endless digits or brackets
        with error_context(lambda error, where=where: f"{where}no JSON: {error}.", bad):  # type: ignore[misc]
            record = json.loads(words)
        if not isinstance(record, dict):
            raise FedShuffleError(f"{where}write one object, such as {{...}}.")
        _check_columns(where.rstrip(": "), list(record))
        yield line, record


def _check_columns(where: str, names: list[str]) -> None:
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise FedShuffleError(
            f"{where}: there is no column {missing[0]!r}. A log needs {', '.join(_NEEDED)}, and may"
            f" have step_size; it has {', '.join(names)}."
        )
    twice = [name for name in (*_NEEDED, "step_size") if names.count(name) > 1]
    if twice:
        raise FedShuffleError(f"{where}: there is more than one column {twice[0]!r}.")


def _row(where: str, line: int, record: Mapping[str, Any]) -> _Row:
    for name in ("round", "client"):
        if isinstance(record[name], bool | list | dict | None) or not str(record[name]).strip():
            raise FedShuffleError(f"{where}: {name} is {record[name]!r}: name it.")

    def value_of(name: str, whole: bool = False) -> float:
        try:
            value = math.nan if isinstance(record[name], bool) else float(record[name])
        except OverflowError:
            value = math.inf
        except (TypeError, ValueError):
            value = math.nan
        if not (int(whole) <= value < 2**52) or (whole and value != int(value)):
            kind = "a whole number of at least 1" if whole else "a number of at least 0"
            kind += " and less than 2**52" if value >= 2**52 else ""
            raise FedShuffleError(f"{where}: {name} is {record[name]!r:.60}, but must be {kind}.")
        return value

    step_size = value_of("step_size") if "step_size" in record else 1.0
    size, steps = int(value_of("size", whole=True)), int(value_of("steps", whole=True))
    names = str(record["round"]), str(record["client"])
    return _Row(line, *names, size, steps, value_of("weight"), step_size)


def _sizes(path: Path, rows: list[_Row]) -> dict[str, int]:
    """The size of each client, which must be the same in every round, and once in each."""
    first: dict[tuple[str, str], int] = {}
    known: dict[str, _Row] = {}
    for row in rows:
        line = first.setdefault((row.round, row.client), row.line)
        if line != row.line:
            raise FedShuffleError(
                f"{path}, line {row.line}: client {row.client} is already in round {row.round}, in"
                f" line {line}. Give each client of a round one line."
            )
        before = known.setdefault(row.client, row)
        if before.size != row.size:
            raise FedShuffleError(
                f"{path}, line {row.line}: client {row.client} has {row.size} examples, but"
                f" {before.size} in line {before.line}. The objective needs one size for each."
            )
    return {client: row.size for client, row in known.items()}
