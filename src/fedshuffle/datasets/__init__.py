"""The data sets of the paper's experiments, and FEMNIST, as federations to train and test on.

Each function gives two federations. :func:`get` downloads what they read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshuffle.datasets.download import get
from fedshuffle.datasets.images import cifar100, femnist
from fedshuffle.datasets.places import cache_folder
from fedshuffle.datasets.sources import SOURCES
from fedshuffle.datasets.text import shakespeare
from fedshuffle.errors import unknown
from fedshuffle.federation import Federation

if TYPE_CHECKING:
    from fedshuffle.datasets.augment import Augment

__all__ = [
    "SOURCES",
    "Augment",
    "cache_folder",
    "cifar100",
    "femnist",
    "get",
    "load",
    "shakespeare",
]

_LOADERS = {"cifar100": cifar100, "femnist": femnist, "shakespeare": shakespeare}


def load(
    name: str, part: str = "train", folder: str | Path | None = None, **options: Any
) -> Federation:
    """One part of a data set, ``"train"`` or ``"test"``, for those who cannot take two at once.

    A config file names it ``fedshuffle.datasets:load``.
    """
    if name not in _LOADERS:
        raise unknown("data set", name, _LOADERS)
    if part not in ("train", "test"):
        raise unknown("part", part, ["train", "test"])
    train, test = _LOADERS[name](folder, **options)
    return train if part == "train" else test


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for."""
    if name == "Augment":
        from fedshuffle.datasets.augment import Augment

        return Augment
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
