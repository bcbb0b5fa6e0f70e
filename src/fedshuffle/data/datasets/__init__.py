"""The data sets of the paper's experiments, and FEMNIST, as federations to train and test on.

Each function returns two federations. :func:`get` downloads their files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshuffle._lazy import attach
from fedshuffle.data.datasets.download import ARCHIVES, get
from fedshuffle.data.datasets.images import cifar100, femnist
from fedshuffle.data.datasets.text import shakespeare
from fedshuffle.errors import check_known
from fedshuffle.federation import Federation

if TYPE_CHECKING:
    from fedshuffle.data.datasets.augment import Augment

__all__ = ["ARCHIVES", "Augment", "cifar100", "femnist", "get", "load", "shakespeare"]

__getattr__ = attach(__name__)  # only Augment needs torch
_LOADERS = {"cifar100": cifar100, "femnist": femnist, "shakespeare": shakespeare}
_PARTS = ["train", "test"]


def load(
    name: str, part: str = "train", folder: str | Path | None = None, **options: Any
) -> Federation:
    """One part of a data set, ``"train"`` or ``"test"``, for callers that take one federation.

    A config file names it ``fedshuffle.data.datasets:load``.
    """
    check_known("data set", name, _LOADERS)
    check_known("part", part, _PARTS)
    return _LOADERS[name](folder, **options)[_PARTS.index(part)]
