"""The data sets of the paper's experiments, and FEMNIST, as federations to train and test on.

Each function returns two federations. :func:`get` downloads their files.
"""

from typing import TYPE_CHECKING

from fedshuffle._lazy import attach
from fedshuffle.data.datasets.download import ARCHIVES, get
from fedshuffle.data.datasets.loaders import cifar100, femnist, load, shakespeare

if TYPE_CHECKING:
    from fedshuffle.data.datasets.augment import Augment

__all__ = ["ARCHIVES", "Augment", "cifar100", "femnist", "get", "load", "shakespeare"]

__getattr__ = attach(__name__)  # only Augment needs torch
