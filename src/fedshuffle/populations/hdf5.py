"""HDF5 as TensorFlow Federated lays it out: ``examples/<client>/<field>``, one row an example.

A file may come from anywhere, and HDF5 lets it point to other files on the reader's machine
(external links and datasets, virtual datasets), or declare arrays of any size. So only what the
file itself holds is read, and nothing is allocated that it cannot hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fedshuffle.errors import FedShuffleError, one_line, unknown
from fedshuffle.federation import Federation
from fedshuffle.populations.chunks import import_chunks
from fedshuffle.populations.sources import Read, distinct, optional, wide_labels

_SMALL = 1 << 26
"""Bytes that may be allocated however little the file holds."""
_COMPRESSION = 1100
"""The most that compression may gain beyond that; deflate gains at most 1032."""


def import_hdf5(
    source: str | Path,
    out: str | Path,
    *,
    fields: Sequence[str] | None = None,
    dtype: Mapping[str, DTypeLike] | None = None,
    read: Read | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Federation:
    """Import an HDF5 file of the kind TensorFlow Federated publishes, client by client.

    The options are those of :func:`import_leaf`, but ``fields`` is needed where the file has more
    than one, unless ``read`` is given; and by default a field is stored as in the file, but one
    whole number an example (a label) as int64.
    """
    path = Path(source)
    with opened(path) as clients:
        known = clients.fields(next(iter(clients)))
        if fields is None and read is None and len(known) > 1:
            raise FedShuffleError(
                f"the examples have the fields {', '.join(known)}. Name those you want as"
                " fields, in the order in which the loss takes them: inputs first, labels last."
            )
        wanted = distinct(fields or known)
        for name in wanted:
            if name not in known:
                raise unknown("field", name, known)
        return import_chunks(
            _chunks(clients, wanted, read),
            out,
            dtype=dtype,
            source={"file": path.name, "format": "hdf5"},
            overwrite=overwrite,
            progress=progress,
        )


def _chunks(
    clients: Clients, wanted: Sequence[str], read: Read | None
) -> Iterator[tuple[str, Mapping[str, ArrayLike]]]:
    for client in clients:
        raw = {name: wide_labels(clients.values(client, name)) for name in wanted}
        yield client, raw if read is None else read(raw)


@contextmanager
def opened(path: Path) -> Iterator[Clients]:
    """The clients in a file."""
    h5py = optional("h5py")
    try:
        file = h5py.File(path, "r")
    except Exception as error:
        raise FedShuffleError(
            f"cannot read {str(path)!r} as HDF5: {one_line(error)}. If it was cut off, get it"
            " again."
        ) from error
    with file:
        yield Clients(file, path)


@final
class Clients:
    """The names of the clients in a file, and what it holds of each."""

    def __init__(self, file: Any, path: Path) -> None:
        self._h5py = optional("h5py")
        self._path = path
        group = self._member(file, "examples", "the group 'examples'")
        with self._reading("the clients"):
            self._names = list(group) if isinstance(group, self._h5py.Group) else []
        self._group = group
        if not self._names or self._client(self._names[0]) is None:
            raise FedShuffleError(
                f"{str(path)!r} has no clients in a group 'examples'. Expected the fields of each"
                " client under examples/<client>/<field>; read other layouts with import_chunks."
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def fields(self, client: str) -> list[str]:
        """The names of a client's fields."""
        with self._reading(f"client {client!r}"):
            return list(self._client(client) or ())

    def values(self, client: str, field: str) -> NDArray[Any]:
        """A field of one client: numbers as they are, text as bytes."""
        what = f"{field!r} of client {client!r}"
        group = self._client(client)
        found = None if group is None else self._member(group, field, what)
        with self._reading(what):
            if not isinstance(found, self._h5py.Dataset):
                raise _RefusedError(
                    "there is none"
                    if found is None
                    else f"{found.name!r} is a {type(found).__name__.lower()}, not an array"
                )
            _check(found)
            return np.asarray(found[()])

    def _client(self, client: str) -> Any:
        """The group of a client; None if it is no group."""
        found = self._member(self._group, client, f"client {client!r}")
        return found if isinstance(found, self._h5py.Group) else None

    def _member(self, group: Any, name: str, what: str) -> Any:
        """What a group itself holds under a name; None if nothing."""
        with self._reading(what):
            link = group.get(name, getlink=True)
            if link is not None and not isinstance(link, self._h5py.HardLink):
                raise _RefusedError(
                    "it is a link to another place, and only what a file itself holds is read. Copy"
                    " the data into the file"
                )
            return group.get(name)

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Say in one line what could not be read, and why."""
        try:
            yield
        except _RefusedError as error:
            remedy = ""
            why: Exception = error
        except Exception as error:  # a damaged file makes h5py raise errors of many kinds
            remedy = " If the file is damaged, get it again."
            why = error
        else:
            return
        raise FedShuffleError(
            f"cannot read {what} in {str(self._path)!r}: {one_line(why)}.{remedy}"
        ) from why


class _RefusedError(Exception):
    """Why something in a file is not read."""


def _check(array: Any) -> None:
    """Refuse an array whose numbers do not all lie in the file, before it is allocated."""
    if array.is_virtual or array.external:
        raise _RefusedError(
            "its numbers lie in other files, and only what a file itself holds is read. Copy them"
            " into the file"
        )
    if array.shape is None:
        raise _RefusedError("it is empty, without a shape")
    stored = array.id.get_storage_size()
    whole = stored > 0 or array.size == 0
    if array.chunks is not None:
        pieces = (-(-n // width) for n, width in zip(array.shape, array.chunks, strict=True))
        whole = array.id.get_num_chunks() == math.prod(pieces)
    if not whole or array.nbytes > _SMALL + _COMPRESSION * stored:
        raise _RefusedError(
            f"it declares {array.nbytes:,} bytes of shape {array.shape}, but only {stored:,} were"
            " written. Write all of it, or get the file again"
        )
