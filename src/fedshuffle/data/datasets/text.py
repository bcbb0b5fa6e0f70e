"""Shakespeare by speaking character, for models that predict the next letter."""

from __future__ import annotations

import string
import warnings
from pathlib import Path

import numpy as np

from fedshuffle._arrays import IGNORED, IntArray, count
from fedshuffle.data.datasets.download import find
from fedshuffle.data.importers.hdf5 import open_clients
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation

CHARACTERS = "".join(sorted(string.ascii_letters + string.digits + "\n\r !\"#$%&'()*,-./:;?@[]_"))
"""The 86 characters of TensorFlow Federated's text generation task, in the order of their codes."""

PADDING, UNKNOWN, BEGIN, END = 0, len(CHARACTERS) + 1, len(CHARACTERS) + 2, len(CHARACTERS) + 3
VOCABULARY = len(CHARACTERS) + 4
"""Number of codes, 90: those above and the characters, which are numbered from 1."""

_CODES = np.full(256, UNKNOWN, dtype=np.int64)
_CODES[[ord(character) for character in CHARACTERS]] = 1 + np.arange(len(CHARACTERS))


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
    train, empty = _read(place / "shakespeare_train.h5", length)
    if empty:
        warnings.warn(
            f"{len(empty)} clients without any text were left out, such as {empty[0]!r}.",
            stacklevel=2,
        )
    test, _ = _read(place / "shakespeare_test.h5", length)
    return train, test


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


def _read(path: Path, sequence: int) -> tuple[Federation, list[str]]:
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
