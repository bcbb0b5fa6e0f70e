"""The history of a run: one record per round, also as the lines of ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedshuffle import _files
from fedshuffle._arrays import jsonable
from fedshuffle.errors import FedShuffleError, error_context

_COSTS = ("clients", "steps", "bytes_down", "bytes_up")
RECORD_KEYS = ("round", *_COSTS, "cohort", "seconds", "evaluation_seconds")
"""Keys of a record that are not metrics."""


def metrics_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics in a record.

    >>> metrics_of({"round": 3, "steps": 20, "loss": 0.5})
    {'loss': 0.5}
    """
    return {name: value for name, value in record.items() if name not in RECORD_KEYS}


class MetricsFile:
    """A file with one record per line. JSON has no NaN: it is null in the file, NaN in Python."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the record of a round; :meth:`sync` brings it to the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(jsonable(record), allow_nan=False) + "\n")

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        with self.path.open("ab") as file:
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All records."""
        return [
            {name: math.nan if value is None else value for name, value in record.items()}
            for _, record in self._lines()
        ]

    def rounds(self) -> list[int]:
        """The rounds that have a record."""
        return [record["round"] for _, record in self._lines()]

    def truncate(self, round: int) -> None:
        """Drop the records after a round."""
        lines = [line + b"\n" for line, record in self._lines() if record["round"] <= round]
        _files.atomic_write(self.path, b"".join(lines))

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        path, remedy = str(self.path), "Put back a copy of it, or start a new run"
        with error_context(
            lambda error: f"{path!r} cannot be read: {error.strerror}. {remedy}.", OSError
        ):
            data = self.path.read_bytes()
        last = 0
        for number, line in enumerate(data.split(b"\n")[:-1], 1):  # the last is empty or cut off
            try:
                record = json.loads(line)
                if type(record) is not dict or type(record.get("round")) is not int:
                    raise ValueError("it has no round")
                if record["round"] <= last:
                    raise ValueError(f"round {record['round']} after round {last}")
            except (ValueError, RecursionError) as error:
                raise FedShuffleError(
                    f"line {number} of {str(self.path)!r} is broken ({error!s:.80}). Put back a"
                    " copy of the file, or delete that line and do without the record."
                ) from error
            last = record["round"]
            yield line, record
