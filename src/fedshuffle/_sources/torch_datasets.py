"""Reads torch datasets into packed tensors, and warns if reading them is random."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from fedshuffle._arrays import IntArray, counts
from fedshuffle.errors import FedShuffleError, error_context, one_line, user_error
from fedshuffle.randomness import restored_generators

_READ_TWICE = 16  # number of examples that are read a second time, to see whether they are random


def read_datasets(datasets: Sequence[Dataset[Any]]) -> tuple[IntArray, list[Tensor]]:
    """The size of each map-style dataset, and all examples packed into one tensor per field."""
    datasets = _checked(datasets)
    with error_context("datasets must have a length", TypeError):
        lengths = [len(dataset) for dataset in datasets]  # type: ignore[arg-type]
    sizes = counts(lengths, "sizes", " Leave out clients without examples.")
    rows = [(i, j) for i, size in enumerate(sizes.tolist()) for j in range(size)]
    fields = _packed(datasets, rows)
    _warn_if_random(datasets, rows, fields)
    return sizes, fields


def _checked(datasets: Iterable[Dataset[Any]]) -> list[Dataset[Any]]:
    if isinstance(datasets, Dataset | DataLoader):
        raise FedShuffleError(
            f"datasets is one {type(datasets).__name__}, but must be a list with a dataset per"
            " client. Split it first, such as with torch.utils.data.Subset."
        )
    listed = list(datasets)
    if not listed:
        raise FedShuffleError("there are no datasets: give one for each client.")
    for i, dataset in enumerate(listed):
        if hasattr(dataset, "column_names") and hasattr(dataset, "features"):
            raise FedShuffleError(
                f"dataset {i} is of Hugging Face. Join them by datasets.concatenate_datasets, with"
                " a column for the client, and use Federation.from_huggingface."
            )
        if isinstance(dataset, DataLoader):
            raise FedShuffleError(f"dataset {i} is a DataLoader. Give its dataset: loader.dataset.")
        if isinstance(dataset, IterableDataset):
            raise FedShuffleError(
                f"dataset {i} is an IterableDataset. Give its examples to data.import_chunks."
            )
    return listed


def _packed(datasets: Sequence[Dataset[Any]], rows: Sequence[tuple[int, int]]) -> list[Tensor]:
    """One tensor per field of the examples with these numbers of dataset and example."""
    examples = []
    for i, j in rows:
        try:  # a context manager would cost more than reading some examples
            examples.append(datasets[i][j])
        except Exception as error:
            raise FedShuffleError(f"example {j} of dataset {i}: {user_error(error)}.") from error
    with error_context(
        lambda error: (
            f"the examples do not fit together: {one_line(error)}. Let the datasets return tensors"
            " and numbers of one shape: convert images to tensors, and pad what differs in length."
        ),
        (TypeError, RuntimeError),
    ):
        collated = default_collate(examples)
    if isinstance(collated, Mapping):
        raise FedShuffleError(
            f"the examples are dicts ({', '.join(map(str, collated))}): let the dataset return"
            " tuples without names, in the order in which the loss takes them."
        )
    fields = [collated] if isinstance(collated, Tensor) else list(collated)
    for k, field in enumerate(fields):
        if not isinstance(field, Tensor):
            raise FedShuffleError(
                "the examples must be tensors or tuples of tensors and numbers, with no names, but"
                f" part {k} {_kind(field)}. Convert it in the dataset."
            )
    return fields


def _kind(field: Any) -> str:
    """What a part of the examples is that is no tensor."""
    first = field[0] if isinstance(field, list | tuple) and field else None
    return f"is text ({first!r:.40})" if isinstance(first, str) else "is neither"


def _warn_if_random(
    datasets: Sequence[Dataset[Any]], rows: Sequence[tuple[int, int]], fields: Sequence[Tensor]
) -> None:
    """Read some examples again: random if they differ, or if a global generator has moved."""
    chosen = np.unique(np.linspace(0, len(rows) - 1, _READ_TWICE).astype(np.int64))
    same = drawn = False
    with restored_generators() as used, suppress(FedShuffleError):  # if they no longer fit together
        again = _packed(datasets, [rows[k] for k in chosen])
        pairs = zip(again, fields, strict=True)
        same = all(torch.equal(_known(new), _known(old[chosen])) for new, old in pairs)
        drawn = used()
    if drawn or not same:
        how = "draws random numbers" if same else "twice gives different values"
        warnings.warn(
            f"reading an example {how}, as with a random transform. Each was read once, and every"
            " epoch sees that draw. Give what is random as transform, a function of minibatches"
            " (see Federation.with_transform), or leave it out.",
            stacklevel=4,
        )


def _known(field: Tensor) -> Tensor:
    """The same numbers, but for NaN, which is refused later and equals nothing."""
    return field.nan_to_num() if field.is_floating_point() else field
