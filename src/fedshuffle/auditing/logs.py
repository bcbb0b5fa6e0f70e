"""Logs of rounds, from any system: what they say of the objective that it minimises."""

import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import number, vector
from fedshuffle.auditing.estimation import Observations, estimate
from fedshuffle.auditing.findings import uneven
from fedshuffle.auditing.over_time import log_windows, window_findings
from fedshuffle.auditing.result import Audit, blackbox_result
from fedshuffle.auditing.server_properties import ServerProperties, describe_weights
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.federation import Federation

_NEEDED = ("round", "client", "size", "steps", "weight")  # the columns

_Row = tuple[str, str, int, int, float, float]  # round, client, size, steps, weight, step size


def read_log(
    path: str | Path, *, weights: ArrayLike | None = None, confidence: float = 0.95
) -> tuple[Audit, Federation]:
    r"""The objective that the system of a log really minimises, and its clients.

    A log is a CSV file with a header, or JSONL with one object per line, one line for every client
    of every round: ``round, client, size, steps, weight`` and, if step sizes differ, ``step_size``.
    The weight is the number by which the server multiplied the client's update.

    The clients are those of the log, ordered by their ids; ``weights`` are those of the objective
    that was meant, in that order, by size if not given. Rounds are in the order of the log, or of
    their numbers; they may be correlated, as clients come and go, if that lasts for much less than
    a sixteenth of the log. Empty rounds are not in the log, and make no difference.

    Args:
        path: the log.
        weights: the weights of the objective that was meant; by size if not given.
        confidence: the confidence of the intervals.

    >>> from tempfile import TemporaryDirectory
    >>> rows = ["round,client,size,steps,weight", "0,a,1,1,0.5", "0,b,3,3,0.5"]
    >>> rows += ["1,a,1,1,0.5", "1,b,3,3,0.5"]
    >>> with TemporaryDirectory() as folder:
    ...     log = Path(folder, "log.csv")
    ...     _ = log.write_text("\n".join(rows))
    ...     audit, federation = read_log(log)
    >>> audit.effective_weights.tolist(), federation.weights.tolist()
    ([0.25, 0.75], [0.25, 0.75])
    """
    number(confidence, "confidence", within="(0, 1)")
    path = Path(path)
    rows = _rows(path)
    if not rows:
        raise FedShuffleError(f"{path}: the log has no rounds.")
    rounds, clients, *columns = zip(*rows, strict=True)
    sizes, steps, weight, step_size = map(np.array, columns)
    # By number if all ids are numbers (int() refuses very long ones), else by text.
    numbers = all(id.isdecimal() and len(id) < 1000 for id in clients)
    ids = sorted(set(clients), key=lambda id: (int(id) if numbers else 0, id))
    place = {id: i for i, id in enumerate(ids)}
    client = np.array([place[id] for id in clients])
    if weights is not None:
        what = f"weights (one for each client of the log: {ids[0]}, ...)"
        weights = vector(weights, what, range(len(ids)))
    of_client = sizes[np.unique(client, return_index=True)[1]]
    federation = dataclasses.replace(Federation.from_sizes(of_client, weights), ids=tuple(ids))

    in_order = list(dict.fromkeys(rounds))
    if all(name.isdecimal() and len(name) < 1000 for name in in_order):
        in_order.sort(key=int)
    names = {name: k for k, name in enumerate(in_order)}
    distance = steps * step_size
    seen = Observations(
        len(names), np.array([names[r] for r in rounds]), client, weight * distance, weight, steps
    )
    taken = np.bincount(client) / len(names)
    counted = ServerProperties(rounds=len(names))
    found = estimate(seen, federation.weights, None)
    windows = log_windows(seen, in_order, len(ids))
    audit = blackbox_result(
        found,
        describe_weights(counted, federation, taken, seen),
        federation,
        confidence,
        probabilities=taken,
        steps=(int(steps.min()), int(steps.max())) if uneven(distance) else None,
        name=path.name,
        source=f"a log of {len(names)} rounds",
        how=f"{len(rows)} updates in {len(names)} rounds",
        windows=windows,
    )
    changes = window_findings(windows, found.weights, ids)
    audit = dataclasses.replace(audit, findings=(*audit.findings, *changes))
    return audit, federation


def _rows(path: Path) -> list[_Row]:
    """The rows of a log; each client must be in a round once, with the same size in every round."""
    rows: list[_Row] = []
    line_of: dict[tuple[str, str], int] = {}
    size_of: dict[str, tuple[int, int]] = {}
    for line, record in _records(path):
        with error_context(f"{path}, line {line}"):
            row = round, client, size, *_ = _row(record)
            before = line_of.setdefault((round, client), line)
            if before != line:
                raise FedShuffleError(
                    f"client {client} is already in round {round}, in line {before}. Give each"
                    " client of a round one line."
                )
            known, before = size_of.setdefault(client, (size, line))
            if known != size:
                raise FedShuffleError(
                    f"client {client} has {size} examples, but {known} in line {before}. The"
                    " objective needs one size for each."
                )
            rows.append(row)
    return rows


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """The records of a log with their line numbers."""
    unreadable = (OSError, UnicodeDecodeError)
    with error_context(lambda error: f"cannot read the log {str(path)!r}: {error}.", unreadable):
        text = path.read_text(encoding="utf-8-sig")
    if path.suffix in (".jsonl", ".ndjson") or text.lstrip().startswith("{"):
        bad = (ValueError, RecursionError)  # also endless digits or brackets
        for line, words in enumerate(text.splitlines(), 1):
            if words.strip():
                with error_context(f"{path}, line {line}: no JSON", bad):
                    record = json.loads(words)
                yield line, record
        return
    reader = csv.DictReader(map(str.strip, text.splitlines()), skipinitialspace=True)
    with error_context(lambda error: f"{path}, line {reader.line_num}: {error}.", csv.Error):
        reader.fieldnames = header = [name.strip() for name in reader.fieldnames or ()]
        for name in (*_NEEDED, "step_size"):
            if header.count(name) > 1:
                raise FedShuffleError(f"{path}: there is more than one column {name!r}.")
        for record in reader:
            yield reader.line_num, record


def _row(record: Any) -> _Row:
    if not isinstance(record, Mapping):
        raise FedShuffleError("write one object, such as {...}.")
    for name in _NEEDED:
        if name not in record:
            raise FedShuffleError(
                f"there is no {name!r}. A log needs {', '.join(_NEEDED)}, and may have step_size;"
                f" this has {', '.join(map(str, record))}."
            )
    if None in record:
        raise FedShuffleError("more entries than the header has columns.")
    for name in ("round", "client"):
        if isinstance(record[name], bool | list | dict | None) or not str(record[name]).strip():
            raise FedShuffleError(f"{name} is {record[name]!r}: name it.")

    def value(name: str, whole: bool = False) -> float:
        try:
            found = math.nan if isinstance(record[name], bool) else float(record[name])
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if not int(whole) <= found < 2**52 or (whole and found % 1):
            kind = "a whole number from 1 to 2**52" if whole else "a number from 0 to 2**52"
            raise FedShuffleError(f"{name} is {record[name]!r:.60}, but must be {kind}.")
        return found

    size, steps = int(value("size", whole=True)), int(value("steps", whole=True))
    step_size = value("step_size") if "step_size" in record else 1.0
    round, client = str(record["round"]).strip(), str(record["client"]).strip()
    return round, client, size, steps, value("weight"), step_size
