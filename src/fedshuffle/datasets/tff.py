"""Reading the HDF5 files of TensorFlow Federated: ``examples/<client>/<field>``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.populations.sources import optional


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The group of clients in a file."""
    h5py = optional("h5py")
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise FedShuffleError(
            f"cannot read {str(path)!r} as HDF5: {error}. Delete it and get it again."
        ) from error
    with file:
        clients = file.get("examples")
        if not isinstance(clients, h5py.Group) or not len(clients):
            raise FedShuffleError(
                f"{str(path)!r} has no clients in a group 'examples'. Expected the fields of each"
                " client under examples/<client>/<field>."
            )
        yield clients


def values(clients: Any, client: str, field: str) -> NDArray[Any]:
    """A field of one client."""
    try:
        return np.asarray(clients[client][field][()])
    except (OSError, KeyError, AttributeError, TypeError) as error:
        raise FedShuffleError(
            f"cannot read {field!r} of client {client!r} in {clients.file.filename!r}: {error}."
        ) from error


def federation(ids: Sequence[str], sizes: Sequence[int], *fields: NDArray[Any]) -> Federation:
    """Clients with names, whose examples lie packed already."""
    return dataclasses.replace(Federation.from_arrays(*fields, sizes=sizes), ids=tuple(ids))
