"""Federations to import, files to import them from, and what tests of data compare."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fedshuffle import Federation
from fedshuffle.data.datasets.download import IMAGE_BYTES


def assert_same(one: Federation, other: Federation) -> None:
    """Both hold the same clients, with the same examples in the same order."""
    assert list(one.ids) == list(other.ids)
    assert one.sizes.tolist() == other.sizes.tolist()
    assert one.weights.tolist() == other.weights.tolist()
    for mine, theirs in zip(one.fields, other.fields, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
        assert np.asarray(mine).dtype == np.asarray(theirs).dtype


def people(n: int = 40, clients: int = 7, seed: int = 0) -> tuple[Any, Any, list[str]]:
    """Inputs, labels, and the client of each row, unsorted."""
    rng = np.random.default_rng(seed)
    owners = [f"client {k}" for k in rng.integers(clients, size=n)]
    return rng.normal(size=(n, 3)).astype(np.float32), rng.integers(5, size=n), owners


def rows_of(x: Any, y: Any, owners: list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """One chunk per row."""
    return ((owner, x[k : k + 1], y[k : k + 1]) for k, owner in enumerate(owners))


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def table(n: int = 500) -> tuple[Any, Any, list[str], dict[str, Any]]:
    x, y, owners = people(n)
    columns = {"a": x[:, 0], "who": owners, "b": x[:, 1], "note": ["n"] * n, "y": y, "c": x[:, 2]}
    return x, y, owners, columns


def write_csv(path: Path, columns: dict[str, Any], delimiter: str = ",") -> None:
    rows = zip(*(map(str, np.asarray(column).tolist()) for column in columns.values()))
    text = "\n".join(delimiter.join(row) for row in [tuple(columns), *rows]) + "\n"
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.write(text)


def leaf_json(users: dict[str, Any]) -> str:
    counts = [len(data["y"]) for data in users.values()]
    return json.dumps({"users": list(users), "num_samples": counts, "user_data": users})


def write_hdf5(path: Path, clients: dict[str, dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for client, fields in clients.items():
            for name, values in fields.items():
                file[f"examples/{client}/{name}"] = values


REAL = os.environ.get("FEDSHUFFLE_DATA")
ANN, BOB = [b"To be", b"", b"or}"], [b"0123456789"]


def real(name: str) -> Path:
    """The folder of the real data, if this machine has it."""
    if REAL is None or not list(Path(REAL).glob(name)):
        pytest.skip(f"FEDSHUFFLE_DATA names no folder with {name}")
    return Path(REAL)


def plays(root: Path, train: dict[str, Any], test: dict[str, Any]) -> Path:
    for part, clients in (("train", train), ("test", test)):
        snippets = {client: {"snippets": texts} for client, texts in clients.items()}
        write_hdf5(root / "shakespeare" / f"shakespeare_{part}.h5", snippets)
    return root


def raw_images(number: int, seed: int = 0) -> Any:
    """Random pixels, where the first pixel of every image is its fine label."""
    rng = np.random.default_rng(seed)
    images = rng.integers(256, size=(number, 3, 32, 32), dtype=np.uint8)
    fine = np.arange(number, dtype=np.uint8) % 100
    images[:, 0, 0, 0] = fine
    return images, fine // 5, fine


def binary(root: Path, train: int = 300, test: int = 70) -> Path:
    place = root / "cifar100"
    place.mkdir(parents=True, exist_ok=True)
    for part, number in (("train", train), ("test", test)):
        images, coarse, fine = raw_images(number)
        rows = np.concatenate([coarse[:, None], fine[:, None], images.reshape(number, -1)], axis=1)
        assert rows.shape[1] == IMAGE_BYTES
        rows.tofile(place / f"{part}.bin")
    return root
