"""Traces from what devices recorded: when each of them came and went, in seconds."""

import csv
import io
import json
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedshuffle._arrays import number
from fedshuffle._files import write_file
from fedshuffle.availability.trace import COLUMNS, Trace
from fedshuffle.errors import FedShuffleError, error_context

_PICKLE = b"\x80"  # how a pickle begins, and no JSON


def convert_device_trace(
    source: str | Path,
    target: str | Path,
    *,
    seconds_per_round: float,
    ids: Sequence[Hashable] = (),
) -> Trace:
    """Write a device trace, in JSON, as a trace, which is returned.

    The JSON object has an entry for each device, as the traces of FedScale (Lai et al. 2022) have:
    ``{"active": [...], "inactive": [...]}``, the seconds at which it came and went; other keys do
    not matter. An interval that ends before it begins is empty, as it is in FedScale. A device is
    there in a round if it is there when the round begins; devices that never are, are left out. The
    others become the clients ``ids``, in the order of the file, or keep their names.

        >>> from tempfile import TemporaryDirectory
        >>> devices = {"7": {"active": [0, 7200], "inactive": [3600, 14000], "finish_time": 86400}}
        >>> with TemporaryDirectory() as folder:
        ...     json_file, csv_file = Path(folder, "devices.json"), Path(folder, "trace.csv")
        ...     _ = json_file.write_text(json.dumps(devices))
        ...     trace = convert_device_trace(json_file, csv_file, seconds_per_round=3600)
        ...     print(csv_file.read_text())
        client,begin,end
        7,0,1
        7,2,4
        <BLANKLINE>
        >>> trace
        trace of 2 intervals over 4 rounds
    """
    length = number(seconds_per_round, "seconds_per_round", within="(0, inf)")
    source, names, rows = Path(source), list[Hashable](), list[tuple[int, int, int]]()
    for device, entry in _devices(source).items():
        with error_context(f"{source}, device {device!r:.40}", FedShuffleError):
            rounds = list(_rounds(_intervals(entry), length))
        if rounds and len(names) < (len(ids) or math.inf):
            rows += [(len(names), begin, end) for begin, end in rounds]
            names.append(ids[len(names)] if ids else device)
    if not names or len(names) < len(ids):
        wanted = f" for {len(ids)} clients" if ids else ""
        raise FedShuffleError(
            f"{source}: {len(names) or 'no'} device{'s are' if len(names) != 1 else ' is'} there at"
            f" the beginning of a round of {length:g} seconds{wanted}. Use shorter rounds, or a"
            " trace of more devices."
        )
    trace = Trace(len(names), *np.array(rows).T, names=names, allow_gaps=True)
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(COLUMNS)
    out.writerows((names[client], begin, end) for client, begin, end in rows)
    write_file(Path(target), text.getvalue())
    return trace


def _devices(source: Path) -> Mapping[str, Any]:
    """The entries of a JSON object, one for each device."""
    fails = (OSError, ValueError, RecursionError)
    with error_context(lambda error: f"cannot read the trace {str(source)!r}: {error}.", fails):
        data = source.read_bytes()
        if data.startswith(_PICKLE):
            raise ValueError(
                "it is a pickle, which could run any code when it is opened. Save it as JSON where"
                " you trust it"
            )
        devices: Any = json.loads(data)
    if not isinstance(devices, Mapping) or not devices:
        raise FedShuffleError(f"{source}: write one JSON object with an entry for each device.")
    return devices


def _intervals(entry: Any) -> list[tuple[float, float]]:
    """The seconds at which a device came and went, in order."""
    if not isinstance(entry, Mapping) or not {"active", "inactive"} <= entry.keys():
        raise FedShuffleError("give the lists 'active' and 'inactive'.")
    came, went = entry["active"], entry["inactive"]
    if not isinstance(came, list) or not isinstance(went, list) or len(came) != len(went):
        raise FedShuffleError("'active' and 'inactive' must be lists of the same length.")
    pairs = [
        (number(a, f"active[{k}]", "[0, inf)"), number(b, f"inactive[{k}]", "[0, inf)"))
        for k, (a, b) in enumerate(zip(came, went, strict=True))
    ]
    return sorted(pair for pair in pairs if pair[1] > pair[0])


def _rounds(intervals: list[tuple[float, float]], length: float) -> Iterator[tuple[int, int]]:
    """The rounds at whose beginning a device is there: from the first to before the last."""
    begin = end = 0
    for came, went in intervals:
        first, last = math.ceil(came / length), math.ceil(went / length)
        if first > end:
            if end > begin:
                yield begin, end
            begin = first
        end = max(end, last)
    if end > begin:
        yield begin, end
