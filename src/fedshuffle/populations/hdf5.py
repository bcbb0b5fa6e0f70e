"""HDF5 as TensorFlow Federated lays it out: ``examples/<client>/<field>``, one row an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

    Args:
        source: the file.
        out: the folder of the store.
        fields: which fields, in the order in which the loss takes them. Needed where the file has
            more than one, unless ``read`` is given.
        dtype: what to store a field as, by its name. By default as in the file, but one whole
            number an example (a label) as int64.
        read: makes numbers of fields that are not, such as text: is given a client's fields by name
            and returns arrays by name, all with one row an example.
        overwrite: replace the store that is there.
        progress: show a bar.
    """
    h5py = optional("h5py")
    path = Path(source)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise FedShuffleError(f"cannot read {str(path)!r} as HDF5: {error}.") from error
    with file:
        clients = file.get("examples")
        first = next(iter(clients.values()), None) if isinstance(clients, h5py.Group) else None
        if not isinstance(first, h5py.Group):
            raise FedShuffleError(
                f"{str(path)!r} has no clients in a group 'examples'. Expected the fields of each"
                " client under examples/<client>/<field>; read other layouts with import_chunks."
            )
        known = list(first)
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
            _chunks(clients, wanted, read, path),
            out,
            dtype=dtype,
            source={"file": path.name, "format": "hdf5"},
            overwrite=overwrite,
            progress=progress,
        )


def _chunks(
    clients: Any, wanted: Sequence[str], read: Read | None, path: Path
) -> Iterator[tuple[str, Mapping[str, ArrayLike]]]:
    for client, examples in clients.items():
        try:
            raw = {name: _values(examples[name]) for name in wanted}
        except (OSError, KeyError, AttributeError) as error:
            raise FedShuffleError(
                f"cannot read client {client!r} of {str(path)!r}: {error}."
            ) from error
        yield client, raw if read is None else read(raw)


def _values(dataset: Any) -> NDArray[Any]:
    """A field of one client: numbers as they are, text as bytes."""
    return wide_labels(np.asarray(dataset[()]))
