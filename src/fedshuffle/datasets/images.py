"""Images: CIFAR-100, split over clients from the raw images, and FEMNIST by writer."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import IntArray, count
from fedshuffle.datasets import tff
from fedshuffle.datasets.places import find
from fedshuffle.datasets.sources import IMAGE_BYTES
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.partition import allocate

_MEAN = (0.5071, 0.4865, 0.4409)
_DEVIATION = (0.2673, 0.2564, 0.2762)
"""Of the pixels of CIFAR-100's training images, by colour, where black is 0 and white is 1."""

_ARRAYS = "cifar100*.npz"
"""Another form in which the images may come."""

Raw = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]
"""Images (examples, 3, 32, 32), coarse labels, fine labels."""


def cifar100(
    folder: str | Path | None = None,
    *,
    clients: int = 500,
    per_client: int = 100,
    alpha: float = 0.1,
    beta: float = 10.0,
    seed: int = 0,
) -> tuple[Federation, Federation]:
    """CIFAR-100, to train on and to test on, split by hierarchical LDA.

    Each client mostly sees a few of the 20 coarse labels (see :func:`fedshuffle.partition.pachinko`
    for ``alpha`` and ``beta``). Images are float32 (examples, 3, 32, 32), normalised by colour;
    labels are the 100 fine ones. The test images are split alike over clients of ``per_client``
    examples each, 100 of them by default. Put :class:`fedshuffle.datasets.Augment` before the model
    for random crops and flips.

    Args:
        folder: the folder in which ``cifar100/train.bin`` lies, or the files; if not given, that of
            FEDSHUFFLE_DATA, or what ``fedshuffle data get cifar100`` left. Instead of the binary
            files one ``cifar100*.npz`` will do, with arrays ``x_train`` (examples, 32, 32, 3),
            ``fine_train`` and ``coarse_train`` of uint8, and the same with ``_test``.
        clients: how many train.
        per_client: examples of each.
        alpha: how evenly a client's examples are spread over coarse labels.
        beta: how evenly over the fine labels under each.
        seed: the split follows from it.
    """
    clients, per_client = count(clients, "clients"), count(per_client, "per_client")
    train, test = _raw_images(find("cifar100", folder, _ARRAYS))
    if clients * per_client > len(train[0]):
        raise FedShuffleError(
            f"{clients} clients with {per_client} images each need {clients * per_client:,} images,"
            f" but there are {len(train[0]):,}. Ask for fewer clients, or for fewer images each."
        )
    testers = max(1, len(test[0]) // per_client)
    test_sizes = np.diff(np.arange(testers + 1) * len(test[0]) // testers)

    def split(raw: Raw, sizes: IntArray, stream: int) -> Federation:
        _, coarse, fine = raw
        owner = allocate(coarse, fine, sizes, alpha=alpha, beta=beta, seed=seed, stream=stream)
        return _packed(raw, sizes, owner)

    return split(train, np.full(clients, per_client), 0), split(test, test_sizes, 1)


def femnist(folder: str | Path | None = None) -> tuple[Federation, Federation]:
    """Handwritten digits and letters by who wrote them, to train on and to test on: 3,400 clients.

    Images are float32 (examples, 1, 28, 28), from 0 (ink) to 1 (paper). Labels are 0 to 9 for the
    digits, then A to Z, then a to z: 62. All of it takes 2.4 GB of memory; to map it from disk
    instead, see :func:`fedshuffle.populations.import_hdf5`.

    Args:
        folder: the folder in which ``femnist/fed_emnist_train.h5`` lies, or the files; if not
            given, that of FEDSHUFFLE_DATA, or what ``fedshuffle data get femnist`` left.
    """
    place = find("femnist", folder)
    return _written(place / "fed_emnist_train.h5"), _written(place / "fed_emnist_test.h5")


def _raw_images(place: Path) -> tuple[Raw, Raw]:
    if (place / "train.bin").is_file():
        return _binary(place / "train.bin"), _binary(place / "test.bin")
    path = sorted(place.glob(_ARRAYS))[0]
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return _arrays(arrays, "train", path), _arrays(arrays, "test", path)
    except FedShuffleError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise FedShuffleError(f"cannot read {str(path)!r} as arrays: {error}.") from error


def _binary(path: Path) -> Raw:
    """Images as the binary version of CIFAR-100 lays them out."""
    try:
        raw = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise FedShuffleError(f"cannot read {str(path)!r}: {error}.") from error
    if not len(raw) or len(raw) % IMAGE_BYTES:
        raise FedShuffleError(
            f"{str(path)!r} is {len(raw):,} bytes long, which is no whole number of images of"
            f" {IMAGE_BYTES:,} bytes. Delete it and get it again."
        )
    rows = raw.reshape(-1, IMAGE_BYTES)
    return _sound((rows[:, 2:].reshape(-1, 3, 32, 32), rows[:, 0], rows[:, 1]), path)


def _arrays(arrays: Any, part: str, path: Path) -> Raw:
    found = []
    for name, shape in ((f"x_{part}", (32, 32, 3)), (f"coarse_{part}", ()), (f"fine_{part}", ())):
        array: NDArray[Any] = arrays[name] if name in arrays else np.zeros(())
        if array.dtype != np.uint8 or not len(array.shape) or array.shape[1:] != shape:
            has = f"of {array.dtype} {array.shape}" if name in arrays else "missing"
            want = " x ".join(map(str, ("examples", *shape)))
            raise FedShuffleError(f"{str(path)!r}: {name} is {has}, but should be uint8 {want}.")
        found.append(array)
    images, coarse, fine = found
    if not len(images) == len(coarse) == len(fine) > 0:
        raise FedShuffleError(f"{str(path)!r}: {part} has not one label of each kind an image.")
    return _sound((images.transpose(0, 3, 1, 2), coarse, fine), path)


def _sound(raw: Raw, path: Path) -> Raw:
    for labels, known, kind in ((raw[1], 20, "coarse"), (raw[2], 100, "fine")):
        if labels.max() >= known:
            raise FedShuffleError(
                f"{str(path)!r} has the {kind} label {labels.max()}, but CIFAR-100 has {known}."
                " Delete it and get it again."
            )
    return raw


def _packed(raw: Raw, sizes: IntArray, owner: IntArray) -> Federation:
    """The images packed by client, normalised; those that nobody owns are left out."""
    order = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
    images, _, fine = raw
    packed = np.empty((len(order), 3, 32, 32), dtype=np.float32)
    for colour in range(3):
        packed[:, colour] = _levels(colour)[images[order, colour]]
    return Federation.from_arrays(packed, fine[order].astype(np.int64), sizes=sizes)


def _levels(colour: int) -> NDArray[np.float32]:
    """What each of the 256 levels of a colour is when normalised."""
    return ((np.arange(256) / 255 - _MEAN[colour]) / _DEVIATION[colour]).astype(np.float32)


def _written(path: Path) -> Federation:
    with tff.opened(path) as clients:
        ids = sorted(clients)
        labels = [clients.values(client, "label").reshape(-1) for client in ids]
        sizes = [len(some) for some in labels]
        pixels = np.empty((sum(sizes), 1, 28, 28), dtype=np.float32)
        ends = np.cumsum(sizes)
        for client, size, end in zip(ids, sizes, ends.tolist(), strict=True):
            images = clients.values(client, "pixels")
            if images.shape != (size, 28, 28) or images.dtype.kind != "f":
                raise FedShuffleError(
                    f"'pixels' of client {client!r} in {str(path)!r} are {images.dtype}"
                    f" {images.shape}, but should be float32 {(size, 28, 28)}."
                )
            pixels[end - size : end, 0] = images
    for client, some in zip(ids, labels, strict=True):
        if some.dtype.kind not in "iu" or (some.size and not 0 <= some.min() <= some.max() < 62):
            raise FedShuffleError(
                f"'label' of client {client!r} in {str(path)!r} are not whole numbers from 0 to 61."
            )
    return tff.federation(ids, sizes, pixels, np.concatenate(labels).astype(np.int64))
