"""The data sets as federations: CIFAR-100, FEMNIST by writer, Shakespeare by speaking character."""

import string
import warnings
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import IGNORED, IntArray, count
from fedshuffle.data.datasets.download import IMAGE_BYTES, find
from fedshuffle.data.importers.clients import open_clients
from fedshuffle.data.partition import allocate
from fedshuffle.errors import FedShuffleError, error_context, unknown
from fedshuffle.federation import Federation

_MEAN = (0.5071, 0.4865, 0.4409)
_DEVIATION = (0.2673, 0.2564, 0.2762)
"""Of the pixels of CIFAR-100's training images, by colour, where black is 0 and white is 1."""

_ARRAYS = "cifar100*.npz"  # another form of the images
_AGAIN = "Delete it and get it again."
Raw = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]
"""Images (examples, 3, 32, 32), coarse labels, fine labels."""

CHARACTERS = "".join(sorted(string.ascii_letters + string.digits + "\n\r !\"#$%&'()*,-./:;?@[]_"))
"""The 86 characters of TensorFlow Federated's text generation task, in the order of their codes."""
PADDING, UNKNOWN, BEGIN, END = 0, len(CHARACTERS) + 1, len(CHARACTERS) + 2, len(CHARACTERS) + 3
"""With the characters, which are numbered from 1, these are 90 codes."""
_CODES = np.full(256, UNKNOWN, dtype=np.int64)
_CODES[[ord(character) for character in CHARACTERS]] = 1 + np.arange(len(CHARACTERS))


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

    Each client mostly sees a few of the 20 coarse labels. Images are float32 (examples, 3, 32, 32),
    normalised by colour; labels are the 100 fine ones. The test images are split in the same way
    over clients of ``per_client`` examples each, 100 of them by default. Put
    :class:`fedshuffle.data.datasets.Augment` before the model for random crops and flips.

    Args:
        folder: the folder that holds ``cifar100/train.bin``, or the files; by default
            FEDSHUFFLE_DATA, or where ``fedshuffle data get cifar100`` put them. One
            ``cifar100*.npz`` of plain arrays is enough as well (docs/how-to/datasets.md).
        clients: number of clients to train on.
        per_client: number of examples of each client.
        alpha, beta: how evenly a client's examples are spread over coarse labels, and over the fine
            labels under each; see :func:`fedshuffle.data.partition.pachinko`.
        seed: determines the split.
    """
    clients, per_client = count(clients, "clients"), count(per_client, "per_client")
    place = find("cifar100", folder, _ARRAYS)
    train, test = _read_images(place, "train"), _read_images(place, "test")
    if clients * per_client > len(train[0]):
        raise FedShuffleError(
            f"{clients} x {per_client} images are more than {len(train[0]):,}. Ask for fewer."
        )
    testers = max(1, len(test[0]) // per_client)
    test_sizes = np.diff(np.arange(testers + 1) * len(test[0]) // testers)

    def split(raw: Raw, sizes: IntArray, stream: int) -> Federation:
        images, coarse, fine = raw
        owner = allocate(coarse, fine, sizes, alpha=alpha, beta=beta, seed=seed, stream=stream)
        order = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
        packed = np.empty((len(order), 3, 32, 32), dtype=np.float32)
        for colour in range(3):
            levels = (np.arange(256) / 255 - _MEAN[colour]) / _DEVIATION[colour]
            packed[:, colour] = levels.astype(np.float32)[images[order, colour]]
        return Federation.from_arrays(packed, fine[order].astype(np.int64), sizes=sizes)

    return split(train, np.full(clients, per_client), 0), split(test, test_sizes, 1)


def femnist(folder: str | Path | None = None) -> tuple[Federation, Federation]:
    """Handwritten digits and letters by writer, to train on and to test on: 3,400 clients.

    Images are float32 (examples, 1, 28, 28), from 0 (ink) to 1 (paper). Labels are 0 to 9 for the
    digits, then A to Z, then a to z: 62. All of it takes 2.4 GB of memory; to map it from disk
    instead, see :func:`fedshuffle.data.import_file`.

    Args:
        folder: the folder that holds ``femnist/fed_emnist_train.h5``, or the files; by default
            FEDSHUFFLE_DATA, or where ``fedshuffle data get femnist`` put them.
    """
    place = find("femnist", folder)
    return _read_writers(place / "fed_emnist_train.h5"), _read_writers(place / "fed_emnist_test.h5")


def shakespeare(
    folder: str | Path | None = None, *, sequence: int = 80
) -> tuple[Federation, Federation]:
    """Shakespeare's lines by speaking character, to train on and to test on: 715 clients.

    A snippet is begin, its characters and end, cut into sequences; the label at each position is
    the next character. Inputs and labels are whole numbers (examples, sequence). After the end of a
    snippet inputs are padding and labels -100, which losses and metrics ignore. Empty snippets are
    skipped. Clients have the same ids in both federations; 26 of them have no text to test on, and
    are missing in the second.

    Args:
        folder: the folder that holds ``shakespeare/shakespeare_train.h5``, or the files; by default
            FEDSHUFFLE_DATA, or where ``fedshuffle data get shakespeare`` put them.
        sequence: number of characters per sequence.
    """
    length = count(sequence, "sequence")
    place = find("shakespeare", folder)
    train, empty = _read_snippets(place / "shakespeare_train.h5", length)
    if empty:
        warnings.warn(
            f"{len(empty)} clients without any text were left out, such as {empty[0]!r}.",
            stacklevel=2,
        )
    test, _ = _read_snippets(place / "shakespeare_test.h5", length)
    return train, test


_LOADERS = {"cifar100": cifar100, "femnist": femnist, "shakespeare": shakespeare}


def load(
    name: str, part: str = "train", folder: str | Path | None = None, **options: Any
) -> Federation:
    """One part of a data set, ``"train"`` or ``"test"``, for callers that take one federation.

    A config file names it ``fedshuffle.data.datasets:load``.
    """
    if name not in _LOADERS:
        raise unknown("data set", name, _LOADERS)
    if part not in ("train", "test"):
        raise unknown("part", part, ["train", "test"])
    train, test = _LOADERS[name](folder, **options)
    return train if part == "train" else test


def _read_images(place: Path, part: str) -> Raw:
    path = place / f"{part}.bin"
    binary = path.is_file()
    if not binary:
        path = sorted(place.glob(_ARRAYS))[0]
    broken = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)
    with error_context(lambda error: f"cannot read {str(path)!r}: {error} {_AGAIN}", broken):
        images, coarse, fine = _from_binary(path) if binary else _from_arrays(path, part)
        for labels, known, kind in ((coarse, 20, "coarse"), (fine, 100, "fine")):
            if labels.max() >= known:
                raise ValueError(f"the {kind} label {labels.max()} is unknown.")
    return images, coarse, fine


def _from_binary(path: Path) -> Raw:
    raw = np.fromfile(path, dtype=np.uint8)
    if not len(raw) or len(raw) % IMAGE_BYTES:
        raise ValueError(f"it holds no whole number of images, but {len(raw):,} bytes.")
    rows = raw.reshape(-1, IMAGE_BYTES)
    return rows[:, 2:].reshape(-1, 3, 32, 32), rows[:, 0], rows[:, 1]


def _from_arrays(path: Path, part: str) -> Raw:
    read: list[NDArray[Any]] = []
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        for kind, shape in {"x": (32, 32, 3), "coarse": (), "fine": ()}.items():
            name = f"{kind}_{part}"
            if name not in arrays:
                raise ValueError(f"{name} is missing.")
            array = arrays[name]
            want = (len(read[0]) if read else array.size // 3072, *shape)
            if array.dtype != np.uint8 or array.shape != want:
                raise ValueError(f"{name} is {array.dtype} {array.shape}, not uint8 {want}.")
            read.append(array)
    return read[0].transpose(0, 3, 1, 2), read[1], read[2]


def _read_writers(path: Path) -> Federation:
    with open_clients(path) as clients:
        ids = sorted(clients.names)
        labels = [clients.values(client, "label").reshape(-1) for client in ids]
        sizes = [len(some) for some in labels]
        pixels = np.empty((sum(sizes), 1, 28, 28), dtype=np.float32)
        begin = 0
        for client, some in zip(ids, labels, strict=True):
            where = f"of client {client!r} in {str(path)!r} are"
            if some.dtype.kind not in "iu" or not ((some >= 0) & (some < 62)).all():
                raise FedShuffleError(f"'label' {where} not whole numbers from 0 to 61.")
            images, want = clients.values(client, "pixels"), (len(some), 28, 28)
            if images.shape != want or images.dtype.kind != "f":
                raise FedShuffleError(
                    f"'pixels' {where} {images.dtype} {images.shape}, not float32 {want}."
                )
            pixels[begin : begin + len(some), 0] = images
            begin += len(some)
    wide = np.concatenate(labels).astype(np.int64)
    return replace(Federation.from_arrays(pixels, wide, sizes=sizes), ids=tuple(ids))


def encoded(text: bytes, sequence: int) -> tuple[IntArray, IntArray]:
    """Inputs and labels of one snippet, one row per sequence.

    >>> inputs, labels = encoded(b"To be", 4)
    >>> [["^" if k == BEGIN else CHARACTERS[k - 1] if k else "" for k in row] for row in inputs]
    [['^', 'T', 'o', ' '], ['b', 'e', '', '']]
    >>> ["$" if k == END else CHARACTERS[k - 1] for k in labels.flat if k > 0]
    ['T', 'o', ' ', 'b', 'e', '$']
    """
    codes = _CODES[np.frombuffer(text, dtype=np.uint8)]
    pairs = len(codes) + 1
    shape = (-(-pairs // sequence), sequence)
    inputs, labels = np.full(shape, PADDING), np.full(shape, IGNORED)
    inputs.flat[:pairs] = np.concatenate([[BEGIN], codes])
    labels.flat[:pairs] = np.concatenate([codes, [END]])
    return inputs, labels


def _read_snippets(path: Path, sequence: int) -> tuple[Federation, list[str]]:
    """The clients of a file, and those without text."""
    sizes: dict[str, int] = {}
    parts: list[tuple[IntArray, IntArray]] = []
    with open_clients(path) as clients:
        for client in clients.names:
            snippets = clients.values(client, "snippets")
            texts = [t.encode() if isinstance(t, str) else t for t in snippets.ravel().tolist()]
            if not all(isinstance(text, bytes) for text in texts):
                raise FedShuffleError(
                    f"'snippets' of client {client!r} in '{path}' holds {snippets.dtype}, no text."
                )
            some = [encoded(text, sequence) for text in texts if text]
            sizes[client] = sum(len(inputs) for inputs, _ in some)
            parts += some
    if not parts:
        raise FedShuffleError(f"{str(path)!r} has no text: all snippets are empty.")
    fields = [np.concatenate(field) for field in zip(*parts, strict=True)]
    owners = np.repeat(list(sizes), list(sizes.values()))
    federation = Federation.from_arrays(*fields, client_ids=owners)
    return federation, [client for client, size in sizes.items() if not size]
