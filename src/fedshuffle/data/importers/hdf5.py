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
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fedshuffle.data.importers.files import Read, distinct, optional, wide_labels
from fedshuffle.errors import FedShuffleError, error_context, one_line, unknown

_SMALL = 1 << 26
"""Bytes that may be allocated however little the file holds."""
_COMPRESSION = 1100
"""Largest compression ratio allowed beyond that; deflate reaches at most 1032."""


def read_clients(
    source: Path,
    fields: Sequence[str] | None,
    dtype: Mapping[str, DTypeLike],
    read: Read | None,
) -> Iterator[tuple[str, Mapping[str, ArrayLike]]]:
    """One client after the other; without ``read``, files with several fields need ``fields``."""
    with open_clients(source) as clients:
        known = clients.fields
        if fields is None and read is None and len(known) > 1:
            raise FedShuffleError(
                f"the examples have the fields {', '.join(known)}. Name those you want as"
                " fields, in the order in which the loss takes them: inputs first, labels last."
            )
        wanted = distinct(fields or known)
        for name in wanted:
            if name not in known:
                raise unknown("field", name, known)
        for client in clients.names:
            raw = {name: wide_labels(clients.values(client, name)) for name in wanted}
            yield client, raw if read is None else read(raw)


@contextmanager
def open_clients(path: Path) -> Iterator[Clients]:
    """The clients in a file."""
    h5py, remedy = optional("h5py"), "If it was cut off, get it again."
    with error_context(
        lambda error: f"cannot read {str(path)!r} as HDF5: {one_line(error)}. {remedy}", Exception
    ):
        file = h5py.File(path, "r")
    with file:
        yield Clients(file, path)


class _RefusedError(Exception):
    """Why something in a file is not read."""


class Clients:
    """The names of the clients in a file, the fields of the first, and the data of each."""

    def __init__(self, file: Any, path: Path) -> None:
        self._h5py = optional("h5py")
        self._path = path
        with self._reading("the clients"):
            self._group = self._member(file, "examples")
            self.names = list(self._group) if isinstance(self._group, self._h5py.Group) else []
            first = self._member(self._group, self.names[0]) if self.names else None
            known = list(first) if isinstance(first, self._h5py.Group) else None
        if known is None:
            raise FedShuffleError(
                f"{str(path)!r} has no clients in a group 'examples'. Expected the fields of each"
                " client under examples/<client>/<field>; read other layouts with import_chunks."
            )
        self.fields: list[str] = known

    def values(self, client: str, field: str) -> NDArray[Any]:
        """A field of one client: numbers as they are, text as bytes."""
        with self._reading(f"{field!r} of client {client!r}"):
            member = self._member(self._member(self._group, client), field)
            if member is None:
                raise _RefusedError("there is none")
            if not isinstance(member, self._h5py.Dataset):
                kind = type(member).__name__.lower()
                raise _RefusedError(f"{member.name!r} is a {kind}, not an array")
            _check(member)
            return np.asarray(member[()])

    def _member(self, group: Any, name: str) -> Any:
        """The member of a group with this name; None if there is none."""
        if not isinstance(group, self._h5py.Group):
            return None
        link = group.get(name, getlink=True)
        if link is not None and not isinstance(link, self._h5py.HardLink):
            raise _RefusedError(
                "it is a link to another place, and only what a file itself holds is read. Copy the"
                " data into the file"
            )
        return group.get(name)

    def _reading(self, what: str) -> AbstractContextManager[None]:
        """Say in one line what could not be read, and why."""

        def message(error: Exception) -> str:
            refused = isinstance(error, _RefusedError)
            remedy = "" if refused else " If the file is damaged, get it again."
            return f"cannot read {what} in {str(self._path)!r}: {one_line(error)}.{remedy}"

        return error_context(message, Exception)  # a damaged file raises errors of many kinds


def _check(array: Any) -> None:
    """Refuse an array that is not completely in the file, before it is allocated."""
    if array.is_virtual or array.external:
        raise _RefusedError(
            "its numbers are in other files, and only what a file itself holds is read. Copy them"
            " into the file"
        )
    if array.shape is None:
        raise _RefusedError("it is empty, without a shape")
    stored = array.id.get_storage_size()
    complete = stored > 0 or array.size == 0
    if array.chunks is not None:
        pieces = (-(-n // width) for n, width in zip(array.shape, array.chunks, strict=True))
        complete = array.id.get_num_chunks() == math.prod(pieces)
    if not complete or array.nbytes > _SMALL + _COMPRESSION * stored:
        raise _RefusedError(
            f"it declares {array.nbytes:,} bytes of shape {array.shape}, but only {stored:,} were"
            " written. Write all of it, or get the file again"
        )
