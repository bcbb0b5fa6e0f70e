"""Reading torch datasets: their examples packed, and a warning where reading them is random."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fedshuffle.errors import FedShuffleError, one_line

_AGAIN = 16
"""Number of examples that are read a second time, to see whether they are random."""


def sizes_of(datasets: Sequence[Dataset[Any]]) -> list[int]:
    """The number of examples of each dataset, which must be of the kind that can be indexed."""
    if isinstance(datasets, Dataset | DataLoader):
        raise FedShuffleError(
            f"datasets is one {type(datasets).__name__}, but must be a list with a dataset per"
            " client. Split it first, such as with torch.utils.data.Subset."
        )
    for i, dataset in enumerate(datasets):
        if isinstance(dataset, DataLoader):
            raise FedShuffleError(
                f"dataset {i} is a DataLoader. Give its dataset (loader.dataset): minibatches are"
                " made in training, of LocalWork(batch_size=...)."
            )
        if isinstance(dataset, IterableDataset):
            raise FedShuffleError(
                f"dataset {i} is an IterableDataset, which has no order to index. Give a map-style"
                " dataset, or its examples to fedshuffle.populations.import_chunks."
            )
    try:
        sizes = [len(dataset) for dataset in datasets]  # type: ignore[arg-type]
    except TypeError as error:
        raise FedShuffleError(f"datasets must have a length: {one_line(error)}.") from error
    return sizes


def packed(datasets: Sequence[Dataset[Any]], rows: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The examples with these numbers of dataset and example, one tensor per field."""
    examples = [datasets[i][j] for i, j in rows]
    try:
        collated = default_collate(examples)
    except (TypeError, RuntimeError) as error:
        raise FedShuffleError(f"the examples do not fit together: {one_line(error)}.") from error
    if isinstance(collated, Tensor):
        return [collated]
    fields = list(collated)
    for k, field in enumerate(fields):
        if not isinstance(field, Tensor):
            raise FedShuffleError(
                "the examples must be tensors or tuples of tensors and numbers, with no names, but"
                f" part {k} is neither. Convert it in the dataset."
            )
    return fields


def warn_of_randomness(
    datasets: Sequence[Dataset[Any]], rows: Sequence[tuple[int, int]], fields: Sequence[Tensor]
) -> None:
    """Warn if reading is random: training sees only the one draw that was read.

    Some examples are read again. They are random if they differ, or if reading them drew from one
    of the global generators, which are then put back to where they were.
    """
    chosen = np.unique(np.linspace(0, len(rows) - 1, _AGAIN).astype(np.int64))
    before = _states()
    try:
        again = packed(datasets, [rows[k] for k in chosen])
        same = all(torch.equal(new, old[chosen]) for new, old in zip(again, fields, strict=True))
        drawn = _states() != before
    except FedShuffleError:  # they no longer fit together
        same = drawn = False
    finally:
        _restore(before)
    if drawn or not same:
        how = "draws random numbers" if same else "twice gives different values"
        warnings.warn(
            f"reading an example {how}, as by a random transform. Each was read once, and every"
            " epoch sees that draw. Put what is random into the model, as a layer that acts in"
            " training only (such as fedshuffle.datasets.Augment), or leave it out.",
            stacklevel=3,
        )


def _states() -> tuple[Any, ...]:
    """The global generators of Python, numpy and torch, in a form that can be compared."""
    name, key, *rest = tuple(np.random.get_state())
    return (
        random.getstate(),
        (name, np.asarray(key).tobytes(), rest),
        torch.get_rng_state().numpy().tobytes(),
    )


def _restore(states: tuple[Any, ...]) -> None:
    python, (name, key, rest), ours = states
    random.setstate(python)
    np.random.set_state((name, np.frombuffer(key, np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(ours), dtype=torch.uint8))
