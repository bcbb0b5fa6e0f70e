"""Populations on disk: stores that are mapped instead of read, and importers that fill them.

:func:`import_file` reads what its suffix says: tables (:func:`import_table`), the JSON of LEAF
(:func:`import_leaf`) and the HDF5 of TensorFlow Federated (:func:`import_hdf5`). Anything else
comes through :func:`import_chunks`, or :class:`StoreWriter` by hand. Open what they leave with
:meth:`fedshuffle.Federation.open`.
"""

from __future__ import annotations

from fedshuffle.populations.chunks import import_chunks
from fedshuffle.populations.files import import_file
from fedshuffle.populations.hdf5 import import_hdf5
from fedshuffle.populations.leaf import import_leaf
from fedshuffle.populations.sources import FORMATS
from fedshuffle.populations.store import Store, open_store
from fedshuffle.populations.tables import import_table
from fedshuffle.populations.writing import StoreWriter

__all__ = [
    "FORMATS",
    "Store",
    "StoreWriter",
    "import_chunks",
    "import_file",
    "import_hdf5",
    "import_leaf",
    "import_table",
    "open_store",
]
