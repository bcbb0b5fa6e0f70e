"""Privacy through ``train``: the noise in the model, the budget, and what resuming keeps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn

from fedshuffle import Federation, Result, train
from fedshuffle._arrays import FloatArray
from fedshuffle.privacy import AdaptiveClipping, Clip, GaussianNoise, Privacy, noise
from fedshuffle.sampling import Independent
from tests.privacy.test_mechanism import Rotation

WIDTH, ROUNDS, SEEDS = 300, 6, 4
SIZES, P = [1, 2, 6], [0.02, 0.05, 0.1]  # most cohorts are empty
ENGINES = ["reference", "sequential", "sequential:2", "vectorized"]


class Still(nn.Module):
    """A model whose loss does not depend on its parameters: noise alone moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (0.0 * self.x).sum() + inputs


def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(inputs).mean()
    return found


def trained(
    privacy: Privacy, sizes: list[int] = SIZES, rounds: int = ROUNDS, **options: Any
) -> Result:
    ones = torch.ones(sum(sizes), 1, dtype=torch.float64)
    federation = Federation.from_arrays(ones, sizes=sizes)
    return train(Still(), federation, loss=loss, rounds=rounds, privacy=privacy, **options)


def end(result: Result) -> torch.Tensor:
    (x,) = result.model.parameters()
    return x.detach()


def moved(privacy: Privacy, **options: Any) -> FloatArray:
    """Where training ends, a row per seed."""
    ends = [end(trained(privacy, seed=seed, **options)) for seed in range(SEEDS)]
    return torch.stack(ends).numpy()


def assert_std(values: FloatArray, std: float) -> None:
    """Fails by chance once in a million seeds; the seeds are fixed."""
    squares = float((values**2).sum()) / std**2
    assert chi2.ppf(5e-7, values.size) < squares < chi2.isf(5e-7, values.size)
    assert len(np.unique(values)) == values.size  # no coordinate or seed repeats another


# The largest w / p is that of the client with 6 examples. Without amplification epsilon is cheap.
PLAIN = Privacy(clip=0.5, noise=1.5, server_draws=False)
CASES = {
    "fixed": (PLAIN, 1.5 * 0.5 * (6 / 9 / 0.1)),
    "weighted": (replace(PLAIN, weighted=True), 1.5 * 0.5),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_every_round_adds_the_promised_noise(name: str, engine: str) -> None:
    privacy, std = CASES[name]
    ends = moved(privacy, sampling=Independent(P), engine=engine)
    assert_std(ends, std * ROUNDS**0.5)


@pytest.mark.parametrize("factor", [0.9, 0.5])
def test_too_little_noise_is_found(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    def planted(values: torch.Tensor, std: float, rng: np.random.Generator) -> torch.Tensor:
        return enough(values, factor * std, rng)

    enough = noise.with_noise
    monkeypatch.setattr(noise, "with_noise", planted)
    with pytest.raises(AssertionError):
        test_every_round_adds_the_promised_noise("fixed", "sequential")


def test_noise_that_is_missing_in_empty_rounds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GaussianNoise, "every_round", False)
    with pytest.raises(AssertionError):
        test_every_round_adds_the_promised_noise("fixed", "sequential")


def test_adaptive_clipping_leaves_a_part_of_the_budget_to_the_count() -> None:
    privacy = Privacy(clip=0.5, noise=1.5, adaptive=AdaptiveClipping(count_noise=2.0))
    std = (1.5**-2 - (2 * 2.0) ** -2) ** -0.5 * 0.5 * 6 / 9
    assert_std(moved(privacy, rounds=1), std)


def test_a_tree_adds_less_over_its_rounds() -> None:
    privacy = Privacy(clip=1.0, noise=1.5, min_separation=4)
    ends = moved(privacy, sizes=[10, 20, 30, 40], sampling=Rotation(), rounds=8)
    std = 1.5 * 0.4 / 0.25
    assert_std(ends, std * 2**0.5)  # two complete trees, one node each


BUDGETS = {
    "noise for an epsilon": Privacy(clip=1.0, epsilon=4.0, delta=1e-2),
    "noise and an epsilon": Privacy(clip=1.0, noise=2.0, epsilon=4.0, delta=1e-2),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_run_stops_at_its_epsilon_also_when_it_is_resumed(name: str, tmp_path: Path) -> None:
    """More rounds than the budget affords change neither the noise nor the last round."""
    first = trained(BUDGETS[name], rounds=3, out=tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    for rounds in (40, 50):
        more = trained(BUDGETS[name], rounds=rounds, out=tmp_path / "run", resume=True)
        after = json.loads((tmp_path / "run" / "run.json").read_text())
        assert after["privacy_noise"] == settings["privacy_noise"]
        spent = [record["epsilon"] for record in more.history]
        assert spent[:3] == [record["epsilon"] for record in first.history]
        assert sorted(spent) == spent
        assert spent[-1] <= 4.0
        assert "epsilon 4, is spent" in str(more.stopped)
        assert (len(spent) == 3) == (BUDGETS[name].noise is None)
    whole = trained(BUDGETS[name], rounds=3 if BUDGETS[name].noise is None else 40)
    assert torch.equal(end(whole), end(more))


def test_a_threshold_is_restored(tmp_path: Path) -> None:
    privacy = Privacy(clip=0.5, noise=1.5, adaptive=AdaptiveClipping(count_noise=2.0))
    trained(privacy, rounds=2, out=tmp_path / "run")
    resumed = trained(privacy, rounds=5, out=tmp_path / "run", resume=True)
    assert torch.equal(end(resumed), end(trained(privacy, rounds=5)))


@pytest.mark.parametrize("channel", ["topk:0.1+ef", "qsgd:4+diana", "float16"])
def test_compression_comes_before_the_noise(channel: str) -> None:
    ends = moved(PLAIN, channel=channel, rounds=2)
    assert np.array_equal(ends, moved(PLAIN, transforms=[Clip(1.0)], rounds=2))
    assert_std(ends, 1.5 * 0.5 * 6 / 9 * 2**0.5)


def test_seeds_have_independent_noise() -> None:
    correlation = np.corrcoef(moved(PLAIN, rounds=2))
    assert np.abs(correlation - np.eye(SEEDS)).max() < 5 * WIDTH**-0.5
