"""Standardised inputs: held against numpy, and the same for held-out rows as for training rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import FedShuffleError
from fedshuffle.data import import_file, open_store
from fedshuffle.data.importers.tables import statistics

TRAINING = np.array([[50.0, 1e9, 3.0], [70.0, 1e9 + 1, 3.0], [30.0, 1e9 + 5, 3.0]])
HELD_OUT = np.array([[90.0, 1e9, 4.0]])


def write(path: Path, rows: Any, head: str = "who,age,pressure,sugar,ill") -> Path:
    lines = [f"ann,{','.join(map(repr, row))},{k % 2}" for k, row in enumerate(rows.tolist())]
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


@given(st.integers(0, 2**32), st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1))
def test_batches_give_the_statistics_of_the_whole(
    seed: int, width: int, lengths: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    parts = [10.0 ** rng.integers(-3, 6, width) + rng.normal(size=(n, width)) for n in lengths]
    whole = np.concatenate(parts)
    mean, deviation = statistics(parts)
    spread = whole.std(0)
    assert mean == pytest.approx(whole.mean(0), rel=1e-12)
    assert deviation == pytest.approx(np.where(spread > 0, spread, 1.0), rel=1e-6)


def test_a_constant_column_becomes_0_for_any_constant() -> None:
    rows = np.full((1000, 1), 0.1)  # the mean differs from 0.1 in the last bit
    mean, deviation = statistics([rows[:7], rows[7:]])
    assert np.abs((rows - mean) / deviation).max() < 1e-12


def test_training_and_held_out_rows_are_scaled_alike(tmp_path: Path) -> None:
    write(tmp_path / "training.csv", TRAINING)
    write(tmp_path / "held-out.csv", HELD_OUT)
    given: dict[str, Any] = {"client": "who", "label": "ill"}
    store = import_file(tmp_path / "training.csv", tmp_path / "t", standardise=True, **given)
    held = import_file(
        tmp_path / "held-out.csv", tmp_path / "h", standardise=tmp_path / "t", **given
    )
    spread = TRAINING.std(0) + np.array([0, 0, 1])  # the last column is constant: only moved to 0
    want = (TRAINING - TRAINING.mean(0)) / spread
    assert np.asarray(store.fields[0]) == pytest.approx(want, abs=1e-6)
    assert store.fields[0].dtype == held.fields[0].dtype
    assert np.asarray(held.fields[0]) == pytest.approx(
        (HELD_OUT - TRAINING.mean(0)) / spread, abs=1e-6
    )
    assert store.fields[1].tolist() == [0, 1, 0]  # labels stay
    statistics = open_store(tmp_path / "t").origin["standardised"]
    assert statistics["mean"] == pytest.approx(TRAINING.mean(0))


@pytest.mark.parametrize(
    ("rows", "head", "options", "message"),
    [
        (HELD_OUT, "who,age,sugar,pressure,ill", {"standardise": "t"}, "name the same"),
        (HELD_OUT, "who,age,pressure,sugar,ill", {"standardise": "raw"}, "not standardised"),
        (
            np.array([[1, 2, 3], [1, np.nan, 2]]),
            "who,age,pressure,sugar,ill",
            {"standardise": True},
            "'ann' has NaN.*example 1",
        ),
        (
            HELD_OUT,
            "who,age,pressure,sugar,ill",
            {"standardise": True, "label": None, "fields": ["age"]},
            "give label",
        ),
    ],
)
def test_what_cannot_be_scaled_is_named(
    tmp_path: Path, rows: Any, head: str, options: dict[str, Any], message: str
) -> None:
    given = {"client": "who", "label": "ill"}
    write(tmp_path / "training.csv", TRAINING)
    import_file(tmp_path / "training.csv", tmp_path / "raw", client="who", label="ill")
    import_file(
        tmp_path / "training.csv", tmp_path / "t", client="who", label="ill", standardise=True
    )
    if isinstance(options["standardise"], str):
        options = {**options, "standardise": tmp_path / options["standardise"]}
    write(tmp_path / "new.csv", rows, head)
    with pytest.raises(FedShuffleError, match=message):
        import_file(tmp_path / "new.csv", tmp_path / "new", **{**given, **options})
    assert not (tmp_path / "new").exists()
