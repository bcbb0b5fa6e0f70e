"""Availability as it was recorded: who was there from when to when.

A trace is a CSV file with a header and one line for each client and interval, in rounds:

    client,begin,end
    ann,0,8
    bob,4,12
    ann,20,24

The client is there in round t if ``begin <= t < end``. The file may name the clients in any order;
it is read line by line, and nothing is unpickled.
"""

import csv
import math
from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, count, frozen, number
from fedshuffle.availability.base import MOST_ROUNDS, Availability, BoolArray
from fedshuffle.availability.independent import Independent
from fedshuffle.errors import FedShuffleError, did_you_mean, error_context

COLUMNS = ("client", "begin", "end")


class Trace(Availability):
    """Clients are there in given intervals; the trace repeats after its last round.

    Interval k is that of client ``clients[k]``, from ``begins[k]`` to before ``ends[k]``. Intervals
    of a client may not overlap, and in every round somebody must be there, unless
    ``allow_gaps=True``: such a round then changes nothing.

        >>> halves = Trace(2, [0, 1], [0, 50], [50, 100])
        >>> halves.period, halves.probability(round=49).tolist()
        (100, [1.0, 0.0])
    """

    def __init__(
        self,
        n: int,
        clients: ArrayLike,
        begins: ArrayLike,
        ends: ArrayLike,
        *,
        names: Sequence[Hashable] | None = None,
        allow_gaps: bool = False,
    ) -> None:
        self._n = count(n, "the number of clients")
        client = np.asarray(clients)
        if client.dtype.kind not in "iu" and client.size:
            raise FedShuffleError(
                f"the clients of a trace must be whole numbers from 0 to {n - 1}: got"
                f" {clients!r:.60}."
            )
        client = client.astype(np.int64)
        begin, end = np.asarray(begins, dtype=np.float64), np.asarray(ends, dtype=np.float64)
        if not client.shape == begin.shape == end.shape or client.ndim != 1 or not len(client):
            raise FedShuffleError("a trace needs one client, begin and end for each interval.")
        named: Sequence[Hashable] = range(n) if names is None else names
        bad = ~((begin >= 0) & (end > begin)) | (client < 0) | (client >= n)
        for k in np.flatnonzero(bad).tolist():
            raise FedShuffleError(
                f"interval {k} of the trace, client {client[k]} from {begin[k]:g} to {end[k]:g}: it"
                f" must be of a client from 0 to {n - 1}, begin at 0 or later, and end after that."
            )
        if end.max() > MOST_ROUNDS:
            raise FedShuffleError(
                f"the trace goes on until round {end.max():g}, of at most {MOST_ROUNDS:,}. Times"
                " are in rounds, not in seconds: 'fedshuffle data trace' converts them. Or take"
                " longer rounds."
            )
        order = np.lexsort((begin, client))
        client, begin, end = client[order], begin[order], end[order]
        for k in np.flatnonzero((np.diff(client) == 0) & (begin[1:] < end[:-1])).tolist():
            raise FedShuffleError(
                f"two intervals of client {named[client[k]]} overlap in the trace: {begin[k]:g} to"
                f" {end[k]:g} and {begin[k + 1]:g} to {end[k + 1]:g}. Join them."
            )
        self.period, self.intervals = math.ceil(end.max()), len(end)
        self._client, self._end = frozen(client), frozen(end)
        # By client, then by time: one sorted vector for all.
        self._begin: FloatArray = frozen(client * float(self.period) + begin)
        self.gaps = _gaps(begin, end, self.period)
        """Successive rounds in which nobody is there."""
        if self.gaps and not allow_gaps:
            gap = self.gaps[0]
            rounds = f"rounds {gap[0]} to {gap[-1]}" if len(gap) > 1 else f"round {gap[0]}"
            raise FedShuffleError(
                f"the trace has a gap: nobody is there in {rounds}. Fill it, or allow gaps"
                " (allow_gaps=True, in a text '+gaps'): the model then stays as it is in such"
                " rounds."
            )

    def __repr__(self) -> str:
        return f"trace of {self.intervals} intervals over {self.period} rounds"

    def __len__(self) -> int:
        return self._n

    @classmethod
    def read(cls, path: str | Path, ids: Sequence[Hashable], *, allow_gaps: bool = False) -> Self:
        r"""The trace in a CSV file, for the clients with these ids.

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder, "trace.csv")
        ...     _ = file.write_text("client,begin,end\nann,0,2\nbob,1,4\n")
        ...     trace = Trace.read(file, ["ann", "bob"])
        >>> [trace.probability(round).tolist() for round in range(3)]
        [[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]
        """
        place = {str(id): i for i, id in enumerate(ids)}
        clients, begins, ends = array("q"), array("d"), array("d")
        for line, record in _records(Path(path)):
            with error_context(f"{path}, line {line}", FedShuffleError):
                name = record["client"].strip()
                if name not in place:
                    raise FedShuffleError(
                        f"there is no client {name!r}.{did_you_mean(name, list(place)[:1000])}"
                        " Leave the line out, or name clients by their ids in the federation."
                    )
                begin = number(record["begin"], "begin", within="[0, inf)")
                ends.append(number(record["end"], "end", within=f"({begin}, inf)"))
                begins.append(begin)
                clients.append(place[name])
        if not clients:
            raise FedShuffleError(f"{path}: the trace has no intervals.")
        with error_context(f"{path}", FedShuffleError):
            columns = np.array(clients), np.array(begins), np.array(ends)
            return cls(len(ids), *columns, names=ids, allow_gaps=allow_gaps)

    def available(self, seed: int, round: int, clients: IntArray) -> BoolArray:
        clients, time = np.asarray(clients, dtype=np.int64), round % self.period
        wanted = clients * float(self.period) + time
        last = np.searchsorted(self._begin, wanted, side="right") - 1
        there: BoolArray = (last >= 0) & (self._client[last] == clients) & (time < self._end[last])
        return there

    def at(self, round: int) -> Independent:
        return Independent(self.probability(round))

    def probability(self, round: int) -> FloatArray:
        return self.available(0, round, np.arange(self._n)).astype(np.float64)


def _gaps(begin: FloatArray, end: FloatArray, period: int) -> list[range]:
    """The rounds in which nobody is there."""
    order = np.argsort(begin)
    first, last = np.ceil(begin[order]).astype(int), np.ceil(end[order]).astype(int)
    holds = last > first  # the beginning of a round
    starts = np.append(0, np.maximum.accumulate(last[holds]))
    stops = np.append(first[holds], period)
    return [range(*pair) for pair in zip(starts.tolist(), stops.tolist()) if pair[0] < pair[1]]


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    """The lines of a trace, one by one, with their numbers."""
    fails = (OSError, UnicodeDecodeError, csv.Error)
    with (
        error_context(lambda error: f"cannot read the trace {str(path)!r}: {error}.", fails),
        path.open(encoding="utf-8-sig", newline="") as file,
    ):
        reader = csv.DictReader(file, skipinitialspace=True)
        reader.fieldnames = header = [name.strip() for name in reader.fieldnames or ()]
        if wrong := [name for name in COLUMNS if header.count(name) != 1]:
            raise FedShuffleError(
                f"{path}: there {'are two columns' if wrong[0] in header else 'is no column'}"
                f" {wrong[0]!r}. A trace has the columns {', '.join(COLUMNS)}; this has"
                f" {', '.join(header) or 'none'}."
            )
        for record in reader:
            if None in record or None in record.values():
                raise FedShuffleError(
                    f"{path}, line {reader.line_num}: give as many entries as there are columns."
                )
            yield reader.line_num, record
