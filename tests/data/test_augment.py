"""Random crops and flips."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedshuffle import Federation, LocalWork, losses, train
from fedshuffle.data.datasets import Augment


def test_every_image_is_shifted_and_flipped_independently() -> None:
    images = torch.rand(400, 3, 5, 4) + 1
    torch.manual_seed(0)
    found = Augment(padding=2)(images)
    padded = nn.functional.pad(images, [2] * 4)
    seen = set()
    for before, after in zip(padded, found, strict=True):
        ways = [
            (down, right, mirrored)
            for down in range(5)
            for right in range(5)
            for mirrored in (False, True)
            if torch.equal(
                after,
                (lambda crop: crop.flip(2) if mirrored else crop)(
                    before[:, down : down + 5, right : right + 4]
                ),
            )
        ]
        assert len(ways) == 1
        seen.add(ways[0])
    assert len(seen) == 50  # all of them


def test_crops_only_and_flips_only() -> None:
    images = torch.rand(50, 1, 3, 3)
    flipped = Augment(padding=0)(images)
    same = (flipped == images).flatten(1).all(1)
    assert 0 < same.sum() < 50
    torch.testing.assert_close(flipped[~same], images[~same].flip(3))
    torch.testing.assert_close(Augment(padding=0, flip=False)(images), images)
    still = Augment().eval()
    assert still(images) is images


@pytest.mark.parametrize("engine", ["reference", "sequential", "sequential:2:processes"])
def test_augmentation_follows_from_seed_round_and_client(engine: str) -> None:
    rng = np.random.default_rng(0)
    images = rng.random((12, 1, 6, 6), dtype=np.float32)
    federation = Federation.from_arrays(images, rng.integers(3, size=12), sizes=[5, 7])

    def run(name: str, seed: int = 5, **options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Augment(padding=2), nn.Flatten(), nn.Linear(36, 3))
        torch.manual_seed(options.pop("disturbed", 1))
        work = LocalWork(epochs=2, batch_size=3)
        options |= {"loss": losses.cross_entropy, "work": work, "rounds": 3}
        result = train(model, federation, seed=seed, engine=name, **options)
        return torch.cat([p.detach().flatten() for p in result.model.parameters()])

    found = run(engine)
    torch.testing.assert_close(found, run("reference"))
    assert torch.equal(found, run(engine, disturbed=2))
    assert not torch.allclose(found, run(engine, seed=6))
