"""Federations on disk: stores that are memory-mapped, and importers that write them.

:func:`import_file` reads tables (Parquet, CSV, TSV), the JSON of LEAF and the HDF5 of TensorFlow
Federated. Import anything else with :func:`import_chunks`. Open the result with
:meth:`fedshuffle.Federation.open`.
"""

from fedshuffle.data.importers.files import FORMATS, import_chunks, import_file
from fedshuffle.data.padding import padded
from fedshuffle.data.storage.store import Store, open_store

__all__ = ["FORMATS", "Store", "import_chunks", "import_file", "open_store", "padded"]
