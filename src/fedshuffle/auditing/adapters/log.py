"""A recorded log of rounds, from any system: who took part, and with which weight.

A log is a CSV file with a header, or JSONL with one object a line, one line for every client of
every round: ``round, client, size, steps, weight`` and, if step sizes differ, ``step_size``. The
weight is that by which the server multiplied the client's update.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import positive
from fedshuffle.auditing.estimation import Sightings, estimate
from fedshuffle.auditing.traits import Coefficients, Traits
from fedshuffle.auditing.verdict import BlackBoxAudit, check_confidence, conclude, uneven
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation

NEEDED = ("round", "client", "size", "steps", "weight")


def read_log(
    path: str | Path, *, weights: ArrayLike | None = None, confidence: float = 0.95
) -> tuple[BlackBoxAudit, Federation]:
    """The objective that the system of a log really minimises, and its clients.

    The clients are those of the log, ordered by their ids; ``weights`` are those of the objective
    that was meant, in that order, and go by size if not given. Rounds are taken for independent
    draws; a round in which nobody took part is not in the log, and makes no difference.
    """
    check_confidence(confidence)
    path = Path(path)
    rows = [_row(path, line, record) for line, record in _records(path)]
    if not rows:
        raise FedShuffleError(f"{path}: the log has no rounds.")
    _check_twice(path, rows)
    ids = _ids(rows)
    place = {id: i for i, id in enumerate(ids)}
    client = np.array([place[row.client] for row in rows])
    sizes = _sizes(path, rows, ids)
    federation = Federation.from_sizes(sizes, weights if weights is None else _own(weights, ids))
    federation = dataclasses.replace(federation, ids=tuple(ids))
    names = {name: k for k, name in enumerate(dict.fromkeys(row.round for row in rows))}
    cohort = np.array([names[row.round] for row in rows])
    steps = np.array([row.steps for row in rows])
    weight = np.array([row.weight for row in rows])
    step_size = np.array([row.step_size for row in rows])
    seen = Sightings(cohort, client, weight * steps * step_size, len(names))
    found = estimate(seen, federation.weights, None)
    taken = np.bincount(client, minlength=len(ids)) / len(names)
    order = np.argsort(cohort, kind="stable")
    given = Coefficients(
        cohort=cohort[order],
        client=client[order],
        weight=weight[order],
        size=sizes[client][order],
        steps=steps[order],
        probability=taken[client][order],
        objective=federation.weights[client][order],
    )
    traits = Traits(
        sums_to=given.sums_to(),
        constant=given.constant() if len(names) > 1 else None,
        form=given.form(None, None),
        rounds=len(names),
    )
    spread = int(steps.min()), int(steps.max())
    audit = conclude(
        found,
        traits,
        name=path.name,
        source=f"a log of {len(names)} rounds",
        how=f"{len(rows)} updates in {len(names)} rounds",
        federation=federation,
        probabilities=taken,
        known=False,
        uneven_steps=spread if uneven(steps * step_size) else None,
        confidence=confidence,
    )
    return audit, federation


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    line: int
    round: str
    client: str
    size: int
    steps: int
    weight: float
    step_size: float


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The records of a log with their line numbers."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FedShuffleError(f"cannot read the log {str(path)!r}: {error}.") from error
    if path.suffix in (".jsonl", ".ndjson") or text.lstrip().startswith("{"):
        yield from _json_records(path, text)
        return
    reader = csv.reader(text.splitlines())
    header: list[str] | None = None
    try:
        for words in reader:
            if not any(word.strip() for word in words):
                continue
            words = [word.strip() for word in words]
            if header is None:
                header = words
                _check_columns(path, reader.line_num, header)
            elif len(words) != len(header):
                raise FedShuffleError(
                    f"{path}, line {reader.line_num}: {len(words)} entries, but the header has"
                    f" {len(header)} columns."
                )
            else:
                yield reader.line_num, dict(zip(header, words, strict=True))
    except csv.Error as error:
        raise FedShuffleError(f"{path}, line {reader.line_num}: {error}.") from error


def _json_records(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for line, words in enumerate(text.splitlines(), 1):
        if not words.strip():
            continue
        try:
            record = json.loads(words)
        except (ValueError, RecursionError) as error:  # bad JSON, endless digits, endless brackets
            raise FedShuffleError(f"{path}, line {line}: no JSON: {error}.") from error
        if not isinstance(record, dict):
            raise FedShuffleError(f"{path}, line {line}: write one object, such as {{...}}.")
        _check_columns(path, line, list(record))
        yield line, record


def _check_columns(path: Path, line: int, names: list[str]) -> None:
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise FedShuffleError(
            f"{path}, line {line}: there is no column {missing[0]!r}. A log needs"
            f" {', '.join(NEEDED)}, and may have step_size; it has {', '.join(names)}."
        )
    twice = [name for name in (*NEEDED, "step_size") if names.count(name) > 1]
    if twice:
        raise FedShuffleError(f"{path}, line {line}: there is more than one column {twice[0]!r}.")


def _row(path: Path, line: int, record: Mapping[str, Any]) -> _Row:
    for name in ("round", "client"):
        if isinstance(record[name], bool | list | dict | None) or not str(record[name]).strip():
            raise FedShuffleError(f"{path}, line {line}: {name} is {record[name]!r}: name it.")

    def positive_number(name: str, whole: bool) -> float:
        try:
            value = math.nan if isinstance(record[name], bool) else float(record[name])
        except OverflowError:
            value = math.inf
        except (TypeError, ValueError):
            value = math.nan
        least = 1 if whole else 0
        if not (least <= value < 2**52) or (whole and value != int(value)):
            kind = "a whole number of at least 1" if whole else "a number of at least 0"
            kind += " and less than 2**52" if value >= 2**52 else ""
            raise FedShuffleError(
                f"{path}, line {line}: {name} is {record[name]!r:.60}, but must be {kind}."
            )
        return value

    step_size = positive_number("step_size", False) if "step_size" in record else 1.0
    return _Row(
        line,
        str(record["round"]),
        str(record["client"]),
        int(positive_number("size", True)),
        int(positive_number("steps", True)),
        positive_number("weight", False),
        step_size,
    )


def _check_twice(path: Path, rows: list[_Row]) -> None:
    first: dict[tuple[str, str], int] = {}
    for row in rows:
        line = first.setdefault((row.round, row.client), row.line)
        if line != row.line:
            raise FedShuffleError(
                f"{path}, line {row.line}: client {row.client} is already in round {row.round}, in"
                f" line {line}. Give each client of a round one line."
            )


def _ids(rows: list[_Row]) -> list[str]:
    """The clients' ids: by number if all are numbers, else by text."""
    ids = sorted({row.client for row in rows})
    numbers = all(id.isdecimal() and len(id) < 1000 for id in ids)  # int() refuses endless digits
    return sorted(ids, key=int) if numbers else ids


def _sizes(path: Path, rows: list[_Row], ids: list[str]) -> Any:
    known: dict[str, _Row] = {}
    for row in rows:
        before = known.setdefault(row.client, row)
        if before.size != row.size:
            raise FedShuffleError(
                f"{path}, line {row.line}: client {row.client} has {row.size} examples, but"
                f" {before.size} in line {before.line}. The objective needs one size for each."
            )
    return np.array([known[id].size for id in ids])


def _own(weights: ArrayLike, ids: list[str]) -> Any:
    return positive(weights, len(ids), f"weights (one for each client of the log: {ids[0]}, ...)")
