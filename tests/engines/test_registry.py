"""Engines by name."""

import re
from pathlib import Path

import pytest

from fedshuffle import FedShuffleError, train
from fedshuffle.engines import make, ray
from tests.engines.models import ENGINES
from tests.problems import Point, copies, half_squared_distance, quadratic, targets


def test_unknown_engines_are_named() -> None:
    with pytest.raises(
        FedShuffleError, match=r"unknown engine 'vectorize'\. Did you mean 'vectorized'"
    ):
        make("vectorize", quadratic(copies([1], targets(1, 2))))


@pytest.mark.parametrize(
    "name", ["sequential:x", "sequential:2:threads", "reference:2", "sequential:", "vectorized:2:2"]
)
def test_engines_that_cannot_be_read_are_named(name: str) -> None:
    with pytest.raises(FedShuffleError, match=f"engine '{name}' cannot be read"):
        make(name, quadratic(copies([1], targets(1, 2))))


@pytest.mark.parametrize(
    "name", ["sequential:1000000", "vectorized:1000000", "sequential:1000000:processes"]
)
def test_more_workers_than_make_sense_are_refused_at_once(name: str, tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match=f"'{name}' asks for 1000000 workers"):
        train(
            Point(2),
            copies([1], targets(1, 2)),
            loss=half_squared_distance,
            rounds=1,
            engine=name,
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [*ENGINES, "vectorized:2", "vectorized:2:processes"])
def test_every_engine_has_its_name_and_can_be_closed(name: str) -> None:
    engine = make(name, quadratic(copies([1], targets(1, 2))))
    assert engine.name == name
    engine.close()


def test_ray_is_used_by_its_public_interface_only() -> None:
    for path in Path(ray.__path__[0]).glob("*.py"):
        assert not re.search(r"_private|_raylet", path.read_text()), path.name
