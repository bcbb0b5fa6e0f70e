"""Shakespeare: counts of the real files, contents of tiny ones."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from fedshuffle import FedShuffleError, losses
from fedshuffle._arrays import IGNORED
from fedshuffle.data import datasets
from fedshuffle.data.datasets import loaders as text
from fedshuffle.models import CharLSTM
from tests.data.helpers import ANN, BOB, plays, real, write_hdf5


def test_the_vocabulary_has_90_entries() -> None:
    assert len(text.CHARACTERS) == len(set(text.CHARACTERS)) == 86
    assert {text.PADDING, text.UNKNOWN, text.BEGIN, text.END} == {0, 87, 88, 89}
    assert set("AZaz09 \n\r@$_#/*%!?.,:;'\"&()[]-") <= set(text.CHARACTERS)
    assert not set("{}<>|=+^~`\\\t") & set(text.CHARACTERS)


def code(character: str) -> int:
    return text.CHARACTERS.index(character) + 1 if character in text.CHARACTERS else text.UNKNOWN


@pytest.mark.parametrize("sequence", [1, 2, 3, 6, 7, 80])
def test_sequences_and_labels_of_snippets(tmp_path: Path, sequence: int) -> None:
    plays(tmp_path, {"BOB": BOB, "ANN": ANN}, {"ANN": [b""], "BOB": [b"x"]})
    train, test = datasets.shakespeare(tmp_path, sequence=sequence)
    assert list(train.ids) == ["ANN", "BOB"]
    assert list(test.ids) == ["BOB"]
    inputs, labels = [], []
    for snippet in ["To be", "or}", "0123456789"]:
        tokens = [text.BEGIN, *map(code, snippet), text.END]
        for begin in range(0, len(tokens) - 1, sequence):
            given = tokens[begin : min(begin + sequence, len(tokens) - 1)]
            wanted = tokens[begin + 1 : begin + 1 + sequence]
            inputs.append(given + [text.PADDING] * (sequence - len(given)))
            labels.append(wanted + [IGNORED] * (sequence - len(wanted)))
    assert train.fields[0].tolist() == inputs
    assert train.fields[1].tolist() == labels
    assert train.fields[0].dtype == train.fields[1].dtype == np.int64
    assert train.sizes.sum() == len(inputs)
    assert train.sizes[1] == -(-11 // sequence)


def test_text_of_fixed_or_variable_length_reads_the_same(tmp_path: Path) -> None:
    fixed = datasets.shakespeare(plays(tmp_path / "a", {"A": ANN}, {"A": ANN}))[0]
    words = np.array([snippet.decode() for snippet in ANN], dtype=h5py.string_dtype())
    other = datasets.shakespeare(plays(tmp_path / "b", {"A": words}, {"A": words}))[0]
    np.testing.assert_array_equal(fixed.fields[0], other.fields[0])


def test_clients_without_text_are_left_out_with_a_warning(tmp_path: Path) -> None:
    plays(tmp_path, {"A": ANN, "B": [b""], "C": np.zeros(0, "S3")}, {"A": ANN})
    with pytest.warns(UserWarning, match="'B'"):
        train, _ = datasets.shakespeare(tmp_path)
    assert list(train.ids) == ["A"]


def test_the_loss_ignores_padding(tmp_path: Path) -> None:
    train, _ = datasets.shakespeare(plays(tmp_path, {"A": [b"hm"]}, {"A": [b"hm"]}))
    torch.manual_seed(0)
    model = CharLSTM(hidden=4)
    inputs, labels = train.tensors()
    short = losses.cross_entropy(model, inputs[:, :3], labels[:, :3])
    torch.testing.assert_close(losses.cross_entropy(model, inputs, labels), short)


def test_the_real_shakespeare() -> None:
    folder = real("shakespeare/shakespeare_t*.h5")
    with h5py.File(folder / "shakespeare" / "shakespeare_train.h5") as file:
        snippets = [bytes(s) for c in file["examples"].values() for s in c["snippets"][()]]
    assert len(snippets) == 16_068
    assert snippets.count(b"") == 150
    train, test = datasets.shakespeare(folder)
    assert len(train) == 715
    assert train.fields[0].shape == train.fields[1].shape == (37_851, 80)
    steps = -(-train.sizes // 32)
    assert (steps.min(), steps.max()) == (1, 32)
    assert set(test.ids) < set(train.ids)
    assert len(train) - len(test) == 26
    counted = train.fields[1] != IGNORED
    assert counted.sum() == sum(len(s) + 1 for s in snippets if s)
    assert (train.fields[1] == text.END).sum() == (train.fields[0] == text.BEGIN).sum() == 15_918
    assert (train.fields[0] == text.UNKNOWN).sum() == 2  # two braces in 2.4 million characters
    assert train.fields[0].max() < 90


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({"A": {"lines": [b"x"]}}, "'snippets' of client 'A'"),
        ({"A": {"snippets": [1.5]}}, "float64"),
        ({"A": {"snippets": [b""]}}, "empty"),
        ({}, "'examples'"),
    ],
)
def test_broken_text_files_are_refused(
    tmp_path: Path, clients: dict[str, Any], message: str
) -> None:
    plays(tmp_path, {}, {"A": [b"x"]})
    write_hdf5(tmp_path / "shakespeare" / "shakespeare_train.h5", clients)
    with pytest.raises(FedShuffleError, match=message):
        datasets.shakespeare(tmp_path)


def test_truncated_text_files_are_refused(tmp_path: Path) -> None:
    path = plays(tmp_path, {"A": ANN}, {"A": ANN}) / "shakespeare" / "shakespeare_train.h5"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(FedShuffleError, match=r"train.h5"):
        datasets.shakespeare(tmp_path)
    with pytest.raises(FedShuffleError, match="sequence is 0"):
        datasets.shakespeare(tmp_path, sequence=0)
