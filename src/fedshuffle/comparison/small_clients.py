"""What a run gives the clients with the fewest training examples."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from fedshuffle.federation import Federation

_FACTS = ("client", "examples")  # the columns of clients.csv that are no metrics


def training_sizes(training: Federation, evaluated: Federation) -> dict[str, int]:
    """The training examples of each client that is evaluated, by its id as text.

    Clients without ids are known by their position. If there are not as many of them in both
    federations, they are others: then nothing is known.

    >>> people = Federation.from_arrays([1.0, 2.0, 3.0], client_ids=["bob", "ann", "bob"])
    >>> training_sizes(people, people.subset([1])), training_sizes(people, people.pooled())
    ({'bob': 2}, {})
    """
    if isinstance(evaluated.ids, range) and len(evaluated) != len(training):
        return {}
    there = set(evaluated.ids)
    sizes = zip(training.ids, training.sizes.tolist(), strict=True)
    return {str(client): size for client, size in sizes if client in there}


def small_decile(file: Path, sizes: Mapping[str, int]) -> dict[str, float]:
    """The mean of each metric over the tenth of clients with the fewest training examples.

    A metric of a client counts if its training size is known and the metric is defined. A tenth is
    rounded up; of clients of equal size the first count.

    Args:
        file: the ``clients.csv`` of a run; without it nothing is known.
        sizes: the training examples of the clients.
    """
    if not sizes or not file.exists():
        return {}
    with file.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["client"] in sizes]
    rows.sort(key=lambda row: sizes[row["client"]])
    found = {}
    for metric in [name for name in (rows[0] if rows else {}) if name not in _FACTS]:
        values = [float(row[metric]) for row in rows if row[metric]]
        few = values[: -(-len(values) // 10)]
        if few:
            found[metric] = math.fsum(few) / len(few)
    return found
