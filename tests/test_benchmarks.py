"""The work that the benchmarks against other libraries do is the work that they state."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

PEERS = Path(__file__).parent.parent / "benchmarks" / "peers"


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PEERS))
    return importlib.import_module("work")


@pytest.mark.parametrize(("kind", "mean", "largest"), [("images", 64, 600), ("text", 20, 200)])
def test_client_sizes_are_as_stated(work: ModuleType, kind: str, mean: float, largest: int) -> None:
    sizes = work.sizes(kind)
    assert len(sizes) == 200
    assert sizes.min() == 8
    assert sizes.max() <= largest
    assert sizes.mean() == pytest.approx(mean, abs=0.5)


def test_steps_are_those_of_two_epochs_in_batches_of_32(work: ModuleType) -> None:
    assert work.steps(np.array([8, 32, 33, 64])) == 2 * (1 + 1 + 2 + 2)


def test_saved_arrays_are_the_clients_examples(work: ModuleType, tmp_path: Path) -> None:
    work.save(tmp_path)
    for name, shape in (("logreg", (784,)), ("cnn", (1, 28, 28)), ("lstm", (80,))):
        data = work.load(tmp_path, name)
        assert data.inputs.shape == (data.sizes.sum(), *shape)
        assert len(data.labels) == data.starts[-1] == data.sizes.sum()
        assert data.rows(199) == slice(len(data.labels) - data.sizes[199], len(data.labels))
    text = work.load(tmp_path, "lstm")
    np.testing.assert_array_equal(text.labels[:, :-1], text.inputs[:, 1:])


def test_cohorts_are_sixteen_different_clients(work: ModuleType) -> None:
    for round in range(20):
        assert len(np.unique(work.cohort(round))) == 16
    assert not np.array_equal(work.cohort(0), work.cohort(1))


@pytest.mark.parametrize("lock", sorted(PEERS.glob("*.txt")), ids=lambda lock: lock.stem)
def test_environments_hold_exact_versions_and_no_cuda(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    names = [line.partition("==")[0].lower() for line in lines]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line) for line in lines)
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]
    assert lock.stem in names
    assert "torch==2.13.0" in lines or "jax" in names
