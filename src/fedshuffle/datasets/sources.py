"""Where the data sets come from, and what must be in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from fedshuffle.datasets import tff
from fedshuffle.errors import FedShuffleError

IMAGE_BYTES = 2 + 3 * 32 * 32
"""An image of CIFAR-100: a coarse label, a fine one, and 32 x 32 pixels in three colours."""


@final
@dataclass(frozen=True)
class Source:
    """An archive, and those of its files that matter."""

    url: str
    checksum: str
    """``algorithm:digest``, as the makers of the data published it."""
    files: Mapping[str, int]
    """How many clients (HDF5) or images (CIFAR-100) each file holds."""
    inside: str = ""
    """The folder of the archive in which the files lie."""

    def check(self, folder: Path) -> None:
        """Refuse files that do not hold what they should."""
        for name, want in self.files.items():
            path = folder / name
            if path.suffix == ".h5":
                with tff.opened(path) as clients:
                    found, what = float(len(clients)), "clients"
            else:
                found, what = path.stat().st_size / IMAGE_BYTES, "images"
            if found != want:
                raise FedShuffleError(
                    f"{str(path)!r} holds {found:,g} {what}, but should hold {want:,}. Delete it"
                    " and get it again."
                )


_TFF = "https://storage.googleapis.com/tff-datasets-public"

SOURCES = {
    "shakespeare": Source(
        url=f"{_TFF}/shakespeare.tar.bz2",
        checksum="sha256:0285be9906cb5f268092eee4edeeacfc2af4574f2941f7cc2f08a321d7f5c707",
        files={"shakespeare_train.h5": 715, "shakespeare_test.h5": 715},
    ),
    "cifar100": Source(
        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        checksum="md5:03b5dce01913d631647c71ecec9e9cb8",
        files={"train.bin": 50_000, "test.bin": 10_000},
        inside="cifar-100-binary",
    ),
    "femnist": Source(
        url=f"{_TFF}/fed_emnist.tar.bz2",
        checksum="sha256:fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
        files={"fed_emnist_train.h5": 3_400, "fed_emnist_test.h5": 3_400},
    ),
}
