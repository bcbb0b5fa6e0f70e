"""Files that name their clients themselves: LEAF's JSON and TensorFlow Federated's HDF5.

LEAF: ``{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}``, split over several files,
each of which LEAF writes from memory. So one file at a time is read into memory.

HDF5: ``examples/<client>/<field>``, one row per example. A file may come from anywhere, and HDF5
lets it point to other files on the reader's machine (external links and datasets, virtual
datasets), or declare arrays of any size. So only what the file itself holds is read, and no more
memory is allocated than its content can need.
"""

import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshuffle._arrays import distinct, wide_labels
from fedshuffle.data.importers.files import FORMATS, find_files, optional
from fedshuffle.errors import FedShuffleError, error_context, one_line, unknown

_STEPS = {"all_data", "rem_user_data", "sampled_data", "test", "train"}
"""Folders that LEAF's scripts make of the same data, one after the other."""
_SMALL = 1 << 26  # bytes that may be allocated however little the file holds
_COMPRESSION = 1100  # largest compression ratio allowed beyond that; deflate reaches at most 1032


def read_leaf(source: Path, fields: Sequence[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """One client after the other; ``users`` and ``num_samples`` must agree with the data."""
    names = distinct(fields or ("x", "y"))
    for path in _leaf_files(source):
        listed, found = _load_leaf(path)
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
                if name not in data:
                    raise unknown(f"field of user {user!r}", name, data)
            raw = {name: data[name] for name in names}
            lengths = [len(values) for values in raw.values() if isinstance(values, list)]
            if said is not None and lengths and said not in lengths:
                raise FedShuffleError(
                    f"user {user!r} of {str(path)!r} has {lengths[0]} examples, but 'num_samples'"
                    f" says {said}. Get the file again, or correct the number."
                )
            yield user, raw


def _leaf_files(source: Path) -> list[Path]:
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


def _load_leaf(path: Path) -> tuple[dict[str, int | None], dict[str, Any]]:
    """The listed users with their numbers of examples, if given, and the data of each user."""
    with _reading(path, "JSON"):
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


def leaf_arrays(raw: Mapping[str, Any], given: Container[str]) -> dict[str, ArrayLike]:
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


def read_hdf5(
    source: Path, fields: Sequence[str] | None, all_fields: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """One client after the other; if there are several fields, ``fields`` or all are chosen."""
    with open_clients(source) as clients:
        known = clients.fields
        if fields is None and not all_fields and len(known) > 1:
            raise FedShuffleError(
                f"the examples have the fields {', '.join(known)}. Name those you want as"
                " fields, in the order in which the loss takes them: inputs first, labels last."
            )
        wanted = distinct(fields or known)
        for name in wanted:
            if name not in known:
                raise unknown("field", name, known)
        for client in clients.names:
            yield client, {name: wide_labels(clients.values(client, name)) for name in wanted}


@contextmanager
def open_clients(path: Path) -> "Iterator[Clients]":
    """The clients in a file."""
    h5py = optional("h5py")
    with _reading(path, "HDF5"):
        file = h5py.File(path, "r")
    with file:
        yield Clients(file, path)


class Clients:
    """The names of the clients in a file, the fields of the first, and the data of each."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file = file
        self._path = path
        with _reading(path, "the clients"):
            examples = self._member("examples")
            self.names = list(examples) if isinstance(examples, Mapping) else []
            first = self._member("examples", self.names[0]) if self.names else None
            self.fields = list(first) if isinstance(first, Mapping) else []
        if not self.fields:
            raise FedShuffleError(
                f"{str(path)!r} has no clients in a group 'examples'. Expected the fields of each"
                " client under examples/<client>/<field>; read other layouts with import_chunks."
            )

    def values(self, client: str, field: str) -> NDArray[Any]:
        """A field of one client: numbers as they are, text as bytes."""
        with _reading(self._path, f"{field!r} of client {client!r}"):
            array = self._member("examples", client, field)
            if array is None:
                raise ValueError("there is none")
            if not hasattr(array, "shape"):
                raise ValueError(f"{array.name!r} is no array")
            _check_complete(array)
            return np.asarray(array[()])

    def _member(self, *names: str) -> Any:
        """What the file itself holds under these names, one within the other, or None."""
        h5py, place = optional("h5py"), self._file
        for name in names:
            if not isinstance(place, h5py.Group):
                return None
            link = place.get(name, getlink=True)
            if link is not None and not isinstance(link, h5py.HardLink):
                raise ValueError("it is a link to another place. Copy the data into the file")
            place = place.get(name)
        return place


def _reading(path: Path, what: str) -> AbstractContextManager[None]:
    """Say in one line what could not be read, and why: a damaged file raises errors of any kind."""
    return error_context(
        lambda error: (
            f"cannot read {what} in {str(path)!r}: {one_line(error)}. If the file is"
            " damaged, get it again."
        ),
        Exception,
    )


def _check_complete(array: Any) -> None:
    """Refuse an array that is not completely in the file, before it is allocated."""
    if array.is_virtual or array.external:
        raise ValueError("its numbers are in other files. Copy them into the file")
    if array.shape is None:
        raise ValueError("it is empty, without a shape")
    stored = array.id.get_storage_size()
    complete = stored > 0 or array.size == 0
    if array.chunks is not None:
        pieces = (-(-n // width) for n, width in zip(array.shape, array.chunks, strict=True))
        complete = array.id.get_num_chunks() == math.prod(pieces)
    if not complete or array.nbytes > _SMALL + _COMPRESSION * stored:
        raise ValueError(f"only {stored:,} of its {array.nbytes:,} bytes were written")
