"""Reading the HDF5 files of TensorFlow Federated into memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from fedshuffle.federation import Federation
from fedshuffle.populations.hdf5 import opened

__all__ = ["federation", "opened"]


def federation(ids: Sequence[str], sizes: Sequence[int], *fields: NDArray[Any]) -> Federation:
    """Clients with names, whose examples lie packed already."""
    return dataclasses.replace(Federation.from_arrays(*fields, sizes=sizes), ids=tuple(ids))
