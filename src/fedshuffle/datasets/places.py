"""Where data sets lie: in a folder that is named, in that of FEDSHUFFLE_DATA, or in the cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fedshuffle.datasets.sources import SOURCES
from fedshuffle.errors import FedShuffleError, unknown

VARIABLE = "FEDSHUFFLE_DATA"


def cache_folder() -> Path:
    """Where this system keeps what can be downloaded again."""
    told = os.environ.get("XDG_CACHE_HOME")
    if told:
        base = Path(told)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ".cache"
    return base / "fedshuffle"


def roots(folder: str | Path | None) -> list[Path]:
    """The folders under which data sets may lie; the first is where a new one is put."""
    if folder is not None:
        return [Path(folder)]
    told = os.environ.get(VARIABLE)
    return [*([Path(told)] if told else []), cache_folder()]


def find(name: str, folder: str | Path | None, *also: str) -> Path:
    """The folder with the files of a data set, or with files like one of the patterns ``also``."""
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    source = SOURCES[name]
    for root in roots(folder):
        for place in (root / name, root / name / source.inside, root, root / source.inside):
            if all((place / file).is_file() for file in source.files):
                return place
            if any(path.is_file() for pattern in also for path in place.glob(pattern)):
                return place
    raise FedShuffleError(
        f"there is no {name} data under {' or '.join(str(root) for root in roots(folder))}. Get it"
        f" with 'fedshuffle data get {name}'; or put {' and '.join(source.files)} into a folder"
        f" {name!r}, and say with folder= or {VARIABLE} in which folder that lies."
    )
