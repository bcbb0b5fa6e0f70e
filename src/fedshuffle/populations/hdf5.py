"""HDF5 as TensorFlow Federated lays it out: ``examples/<client>/<field>``, one row an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.populations.chunks import import_chunks
from fedshuffle.populations.sources import Read, distinct, optional, wide_labels


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
        known = list(next(iter(clients.values())))
        if fields is None and read is None and len(known) > 1:
            raise FedShuffleError(
                f"the examples have the fields {', '.join(known)}. Name those you want, in the"
                " order in which the loss takes them: inputs first, labels last."
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
    clients: Any, wanted: Sequence[str], read: Read | None
) -> Iterator[tuple[str, Mapping[str, ArrayLike]]]:
    for client in clients:
        raw = {name: wide_labels(values(clients, client, name)) for name in wanted}
        yield client, raw if read is None else read(raw)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The group of clients in a file."""
    h5py = optional("h5py")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise FedShuffleError(
            f"cannot read {str(path)!r} as HDF5: {error}. If it was cut off, get it again."
        ) from error
    with file:
        clients = file.get("examples")
        first = next(iter(clients.values()), None) if isinstance(clients, h5py.Group) else None
        if not isinstance(first, h5py.Group):
            raise FedShuffleError(
                f"{str(path)!r} has no clients in a group 'examples'. Expected the fields of each"
                " client under examples/<client>/<field>; read other layouts with import_chunks."
            )
        yield clients


def values(clients: Any, client: str, field: str) -> NDArray[Any]:
    """A field of one client: numbers as they are, text as bytes."""
    h5py = optional("h5py")
    fields = clients.get(client)
    found = fields.get(field) if isinstance(fields, h5py.Group) else None
    try:
        if isinstance(found, h5py.Dataset):
            return np.asarray(found[()])
        why = "there is none" if found is None else f"{found.name!r} is a group, not an array"
    except (OSError, TypeError) as error:
        why = str(error)
    raise FedShuffleError(
        f"cannot read {field!r} of client {client!r} in {clients.file.filename!r}: {why}."
    )
