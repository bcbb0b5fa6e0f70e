"""Shakespeare by speaking character, for models that guess the next letter."""

from __future__ import annotations

import string
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedshuffle._arrays import IntArray, count
from fedshuffle.datasets import tff
from fedshuffle.datasets.places import find
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation

_IGNORED = -100
"""As in ``fedshuffle.losses``, which would import torch."""

CHARACTERS = "".join(sorted(string.ascii_letters + string.digits + "\n\r !\"#$%&'()*,-./:;?@[]_"))
"""The 86 characters of TensorFlow Federated's text generation task, in the order of their codes."""

PADDING, UNKNOWN, BEGIN, END = 0, len(CHARACTERS) + 1, len(CHARACTERS) + 2, len(CHARACTERS) + 3
"""What stands beside the characters, which are numbered from 1."""

VOCABULARY = len(CHARACTERS) + 4
"""All of these: 90."""

_CODES = np.full(256, UNKNOWN, dtype=np.int64)
_CODES[[ord(character) for character in CHARACTERS]] = 1 + np.arange(len(CHARACTERS))


def shakespeare(
    folder: str | Path | None = None, *, sequence: int = 80
) -> tuple[Federation, Federation]:
    """Shakespeare's lines by who speaks them, to train on and to test on: 715 clients.

    A snippet is begin, its characters and end, cut into sequences; the label at each position is
    the character that follows. Inputs and labels are whole numbers (examples, sequence). Behind the
    end of a snippet inputs are padding and labels -100, which no loss or metric counts. Empty
    snippets are skipped. Clients have the same ids in both; 26 of them have no text to be tested
    on, and are missing in the second.

    Args:
        folder: the folder in which ``shakespeare/shakespeare_train.h5`` lies, or the files; if not
            given, that of FEDSHUFFLE_DATA, or what ``fedshuffle data get shakespeare`` left.
        sequence: characters in a sequence.
    """
    length = count(sequence, "sequence")
    place = find("shakespeare", folder)
    train, silent = _federation(place / "shakespeare_train.h5", length)
    if silent:
        warnings.warn(
            f"{len(silent)} clients without any text were left out, such as {silent[0]!r}.",
            stacklevel=2,
        )
    test, _ = _federation(place / "shakespeare_test.h5", length)
    return train, test


def encoded(text: bytes, sequence: int) -> tuple[IntArray, IntArray]:
    """Inputs and labels of one snippet, a row a sequence.

    >>> inputs, labels = encoded(b"To be", 4)
    >>> [["^" if k == BEGIN else CHARACTERS[k - 1] if k else "" for k in row] for row in inputs]
    [['^', 'T', 'o', ' '], ['b', 'e', '', '']]
    >>> ["$" if k == END else CHARACTERS[k - 1] for k in labels.flat if k > 0]
    ['T', 'o', ' ', 'b', 'e', '$']
    """
    codes = _CODES[np.frombuffer(text, dtype=np.uint8)]
    pairs = len(codes) + 1
    shape = (-(-pairs // sequence), sequence)
    inputs, labels = np.full(shape, PADDING), np.full(shape, _IGNORED)
    inputs.flat[:pairs] = np.concatenate([[BEGIN], codes])
    labels.flat[:pairs] = np.concatenate([codes, [END]])
    return inputs, labels


def _federation(path: Path, sequence: int) -> tuple[Federation, list[str]]:
    """The clients of a file, and those that have no text."""
    ids, sizes, silent = [], [], []
    parts: list[tuple[IntArray, IntArray]] = []
    with tff.opened(path) as clients:
        for client in sorted(clients):
            begin = len(parts)
            snippets = clients.values(client, "snippets")
            parts += [encoded(text, sequence) for text in _texts(snippets, client, path) if text]
            if len(parts) > begin:
                ids.append(client)
                sizes.append(sum(len(inputs) for inputs, _ in parts[begin:]))
            else:
                silent.append(client)
    if not ids:
        raise FedShuffleError(f"{str(path)!r} has no text: all snippets are empty.")
    fields = [np.concatenate(field) for field in zip(*parts, strict=True)]
    return tff.federation(ids, sizes, *fields), silent


def _texts(snippets: Any, client: str, path: Path) -> Iterator[bytes]:
    for text in snippets.reshape(-1).tolist():
        if isinstance(text, str):
            text = text.encode()
        if not isinstance(text, bytes):
            raise FedShuffleError(
                f"'snippets' of client {client!r} in {str(path)!r} holds {snippets.dtype} values,"
                " but should hold text."
            )
        yield text
