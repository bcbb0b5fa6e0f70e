"""HDF5 as TensorFlow Federated lays it out: ``examples/<client>/<field>``, one row per example.

A file may come from anywhere, and HDF5 lets it point to other files on the reader's machine
(external links and datasets, virtual datasets), or declare arrays of any size. So only what the
file itself holds is read, and no more memory is allocated than its content can need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle.data.importers.files import distinct, optional, wide_labels
from fedshuffle.errors import FedShuffleError, check_known, error_context, one_line

_SMALL = 1 << 26
"""Bytes that may be allocated however little the file holds."""
_COMPRESSION = 1100
"""Largest compression ratio allowed beyond that; deflate reaches at most 1032."""


def read_clients(
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
            check_known("field", name, known)
        for client in clients.names:
            yield client, {name: wide_labels(clients.values(client, name)) for name in wanted}


@contextmanager
def open_clients(path: Path) -> Iterator[Clients]:
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
