"""JSON as LEAF writes it: ``{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}``.

LEAF splits its data over several files, each of which it writes from memory. So one file at a time
is read into memory.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle.data.importers.files import FORMATS, distinct, find_files
from fedshuffle.errors import FedShuffleError, check_known, error_context, one_line

_STEPS = {"all_data", "rem_user_data", "sampled_data", "test", "train"}
"""Folders that LEAF's scripts make of the same data, one after the other."""


def read_clients(
    source: Path, fields: Sequence[str] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """One client after the other; ``users`` and ``num_samples`` must agree with the data."""
    names = distinct(fields or ("x", "y"))
    for path in _paths(source):
        listed, found = _load(path)
        for user in dict.fromkeys([*listed, *found]):
            said, data = listed.get(user), found.pop(user, None)
            if data is None and said == 0:
                data = {name: [] for name in names}
            if not isinstance(data, dict):
                raise FedShuffleError(
                    f"{str(path)!r} has no examples of user {user!r} under 'user_data', but lists"
                    f" {said or 'some'}. Get the file again, or take that user from the list."
                )
            for name in names:
                check_known(f"field of user {user!r}", name, data)
            raw = {name: data[name] for name in names}
            lengths = [len(values) for values in raw.values() if isinstance(values, list)]
            if said is not None and lengths and said not in lengths:
                raise FedShuffleError(
                    f"user {user!r} of {str(path)!r} has {lengths[0]} examples, but 'num_samples'"
                    f" says {said}. Get the file again, or correct the number."
                )
            yield user, raw


def _paths(source: Path) -> list[Path]:
    """The files, unless they are of several steps of LEAF, which hold the same examples or more."""
    paths = find_files(source, FORMATS["leaf"])
    folders = {part for path in paths for part in path.relative_to(source).parts[:-1]}
    steps = sorted(folders & _STEPS)
    if len(steps) > 1:
        one = next(path.parent for path in reversed(paths) if steps[-1] in path.parts)
        raise FedShuffleError(
            f"{str(source)!r} holds {', '.join(steps[:-1])} and {steps[-1]}, which must not be"
            f" merged. Give one of them, such as {str(one)!r}."
        )
    return paths


def _load(path: Path) -> tuple[dict[str, int | None], dict[str, Any]]:
    """The listed users with their numbers of examples, if given, and the data of each user."""
    with error_context(
        lambda error: (
            f"cannot read {str(path)!r} as JSON: {one_line(error)}. If it is damaged, get it again."
        ),
        (OSError, ValueError, RecursionError),
    ):
        content = json.loads(path.read_bytes())
    facts = content if isinstance(content, dict) else {}
    users, counts, data = facts.get("users", []), facts.get("num_samples"), facts.get("user_data")
    if not (isinstance(data, dict) and data):
        raise FedShuffleError(f"{str(path)!r} has no users under 'user_data', as LEAF files do.")
    if not (isinstance(users, list) and all(isinstance(user, str) for user in users)):
        raise FedShuffleError(f"{str(path)!r} has 'users' that are no names.")
    counts = [None] * len(users) if counts is None else counts
    whole = isinstance(counts, list) and all(isinstance(n, int | None) for n in counts)
    if not whole or len(counts) != len(users):
        raise FedShuffleError(f"{str(path)!r} has 'num_samples' that are no number for each user.")
    return dict(zip(users, counts, strict=True)), data


def as_arrays(raw: Mapping[str, Any], given: Container[str]) -> dict[str, ArrayLike]:
    """float32, but for labels and fields of a given dtype: JSON does not tell 1.0 from 1."""
    arrays: dict[str, ArrayLike] = dict(raw)
    for name, values in raw.items():
        with suppress(ValueError):  # rows of unequal lengths, which the store will name
            array = np.asarray(values)
            label = array.ndim == 1 and array.dtype.kind in "biu"
            real = array.dtype.kind in "biuf" and not label and name not in given
            with np.errstate(over="ignore"):  # the store refuses infinity
                arrays[name] = array.astype(np.float32) if real else array
    return arrays
