"""FEMNIST and CIFAR-100: contents of tiny files, and a part of the real ones."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fedshuffle import FedShuffleError
from fedshuffle.data import datasets
from fedshuffle.data.datasets.loaders import _DEVIATION, _MEAN
from tests.data.helpers import binary, raw_images, real, write_hdf5


def writers(root: Path, **changes: Any) -> Path:
    rng = np.random.default_rng(0)
    people = {
        name: {
            "pixels": rng.random((size, 28, 28), dtype=np.float32),
            "label": rng.integers(62, size=size).astype(np.int32),
        }
        for name, size in (("f01", 3), ("f00", 2))
    }
    write_hdf5(root / "femnist" / "fed_emnist_test.h5", people)
    people["f00"] |= changes
    write_hdf5(root / "femnist" / "fed_emnist_train.h5", people)
    return root


def test_femnist_by_writer(tmp_path: Path) -> None:
    train, test = datasets.femnist(writers(tmp_path))
    assert list(train.ids) == list(test.ids) == ["f00", "f01"]
    assert train.sizes.tolist() == [2, 3]
    assert train.fields[0].shape == (5, 1, 28, 28)
    assert (train.fields[0].dtype, train.fields[1].dtype) == (np.float32, np.int64)
    with h5py.File(tmp_path / "femnist" / "fed_emnist_train.h5") as file:
        for k, name in enumerate(train.ids):
            pixels, labels = train.client(k)
            np.testing.assert_array_equal(pixels[:, 0], file[f"examples/{name}/pixels"])
            np.testing.assert_array_equal(labels, file[f"examples/{name}/label"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pixels": np.zeros((2, 28, 27), "f4")}, "28, 27"),
        ({"pixels": np.zeros((1, 28, 28), "f4")}, "1, 28, 28"),
        ({"pixels": np.zeros((2, 28, 28), "u1")}, "'pixels'"),
        ({"pixels": np.full((2, 28, 28), np.nan, "f4")}, "NaN or infinity"),
        ({"label": np.array([0, 62])}, "'label'"),
        ({"label": np.array([0.0, 1.0])}, "'label' of client 'f00'"),
    ],
)
def test_broken_femnist_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        datasets.femnist(writers(tmp_path, **changes))


def arrays(train: int = 300, test: int = 70) -> dict[str, Any]:
    found = {}
    for part, number in (("train", train), ("test", test)):
        images, coarse, fine = raw_images(number)
        found[f"x_{part}"] = images.transpose(0, 2, 3, 1)
        found[f"coarse_{part}"], found[f"fine_{part}"] = coarse, fine
    return found


def npz(root: Path, **changes: Any) -> Path:
    (root / "cifar100").mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in (arrays() | changes).items() if value is not None}
    np.savez(root / "cifar100" / "cifar100.npz", **kept)
    return root


def test_cifar100_is_split_and_normalised(tmp_path: Path) -> None:
    train, test = datasets.cifar100(binary(tmp_path), clients=14, per_client=20, seed=3)
    assert train.sizes.tolist() == [20] * 14
    assert test.sizes.tolist() == [23, 23, 24]
    images, labels = train.fields
    assert (images.dtype, labels.dtype) == (np.float32, np.int64)

    mean, deviation = np.array(_MEAN)[:, None, None], np.array(_DEVIATION)[:, None, None]
    for some, number in ((train, 300), (test, 70)):
        raw, _, _ = raw_images(number)
        back = np.rint((some.fields[0] * deviation + mean) * 255).astype(int)
        np.testing.assert_array_equal(back[:, 0, 0, 0], some.fields[1])
        dealt = {image.tobytes() for image in back.astype(np.uint8)}
        assert len(dealt) == len(back)  # no two clients share an image
        assert dealt <= {image.tobytes() for image in raw}


def test_the_split_follows_from_the_seed(tmp_path: Path) -> None:
    binary(tmp_path)
    options: Any = {"clients": 10, "per_client": 20}
    one, again, other = (datasets.cifar100(tmp_path, **options, seed=k)[0] for k in (1, 1, 2))
    np.testing.assert_array_equal(one.fields[0], again.fields[0])
    assert not np.array_equal(one.fields[1], other.fields[1])
    narrow, _ = datasets.cifar100(tmp_path, **options, alpha=1e-9)
    assert len(set((narrow.client(0)[1] // 5).tolist())) <= 2  # 15 images of each coarse label


def test_npz_and_binary_files_read_the_same(tmp_path: Path) -> None:
    one, _ = datasets.cifar100(binary(tmp_path / "a"), clients=10, per_client=30)
    other, _ = datasets.cifar100(npz(tmp_path / "b"), clients=10, per_client=30)
    np.testing.assert_array_equal(one.fields[0], other.fields[0])
    np.testing.assert_array_equal(one.fields[1], other.fields[1])


def test_the_real_subset_of_cifar100() -> None:
    train, test = datasets.cifar100(real("cifar100/*.npz"), clients=50)
    assert train.fields[0].shape == (5_000, 3, 32, 32)
    assert np.bincount(train.fields[1]).tolist() == [50] * 100
    assert test.fields[0].shape == (1_000, 3, 32, 32)
    np.testing.assert_allclose(train.fields[0].mean((0, 2, 3)), 0, atol=0.03)
    np.testing.assert_allclose(train.fields[0].std((0, 2, 3)), 1, atol=0.03)


def test_broken_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match="500 x 100 images"):
        datasets.cifar100(binary(tmp_path))
    path = tmp_path / "cifar100" / "train.bin"
    whole = path.read_bytes()
    for broken in (whole[:-1], b""):
        path.write_bytes(broken)
        with pytest.raises(FedShuffleError, match="images"):
            datasets.cifar100(tmp_path, clients=2)
    for place, message in ((0, "coarse label 200"), (1, "fine label 200")):
        path.write_bytes(whole[:place] + bytes([200]) + whole[place + 1 :])
        with pytest.raises(FedShuffleError, match=message):
            datasets.cifar100(tmp_path, clients=2)
    with pytest.raises(FedShuffleError, match="per_client is 0"):
        datasets.cifar100(tmp_path, per_client=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fine_test": None}, "fine_test is missing"),
        ({"x_train": np.zeros((300, 3, 32, 32), np.uint8)}, "x_train"),
        ({"coarse_train": np.zeros(300)}, "coarse_train"),
        ({"fine_train": np.zeros(299, np.uint8)}, "fine_train"),
        ({"fine_train": np.full(300, 100, np.uint8)}, "fine label 100"),
        ({"x_test": np.array([None])}, "cifar100.npz"),
    ],
)
def test_broken_npz_files_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedShuffleError, match=message):
        datasets.cifar100(npz(tmp_path, **changes), clients=2)


def test_truncated_npz_files_are_refused(tmp_path: Path) -> None:
    path = npz(tmp_path) / "cifar100" / "cifar100.npz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(FedShuffleError, match="cannot read"):
        datasets.cifar100(tmp_path, clients=2)
