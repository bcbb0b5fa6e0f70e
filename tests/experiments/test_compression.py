"""Compression and reshuffling: claims follow from curves, and curves from the channels."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshuffle._arrays import FloatArray
from fedshuffle.engines import ReferenceEngine
from fedshuffle.errors import FedShuffleError
from fedshuffle.experiments import compression
from fedshuffle.experiments.claims import Claim
from fedshuffle.experiments.compression import (
    ETA,
    LOCAL,
    METHODS,
    PANELS,
    SEEDS,
    claims,
    compute,
    label,
    reproduce,
)
from fedshuffle.experiments.toy_problems import equal, trajectory
from fedshuffle.transforms import Channel, ClientContext

LEVELS = {  # with replacement and reshuffled, as the paper says
    "none": (1e-3, 1e-10),
    "randk:0.25": (1e-2, 1e-2),
    "qsgd:2": (1e-2, 1e-2),
    "qsgd:8": (1e-2, 1e-2),
    "randk:0.25+diana": (3e-3, 1.5e-10),
    "qsgd:2+diana": (3e-3, 1.5e-10),
    "qsgd:8+diana": (3e-3, 1.5e-10),
    "topk:0.25": (2e-2, 4e-2),
    "topk:0.25+ef": (1e-3, 1e-3),
    "topk:0.25+ef21": (1e-3, 1e-10),
}


def ending_at(levels: Mapping[str, tuple[float, float]]) -> compression.Results:
    """Curves that end at some levels, with replacement and reshuffled."""

    def curve(end: float) -> dict[str, Any]:
        return {"mean": [1.0] * 50 + [end] * 50, "std": [0.0] * 100}

    return {
        panel: {
            label(order, text): curve(levels[text][k])
            for text in texts
            for k, order in enumerate(METHODS)
        }
        for panel, texts in PANELS.items()
    }


def unseen(found: list[Claim]) -> list[tuple[str, str]]:
    return [(claim.panel, claim.text) for claim in found if not claim.seen]


def test_curves_as_claimed_show_every_claim() -> None:
    found = claims(ending_at(LEVELS))
    assert len(found) == 15
    assert unseen(found) == []


@pytest.mark.parametrize(
    ("channel", "levels", "panel", "text"),
    [
        ("none", (1e-3, 2e-4), "randk", "Without compression, reshuffling ends far below"),
        ("qsgd:8", (1e-2, 1e-3), "fine", "Q-NASTYA loses"),
        ("qsgd:2", (1e-10, 1e-10), "qsgd", "Q-NASTYA loses"),
        ("qsgd:2+diana", (1e-3, 1e-3), "qsgd", "DIANA-NASTYA restores it"),
        ("randk:0.25+diana", (1e-3, 1e-9), "randk", "DIANA-NASTYA ends at the level"),
        ("topk:0.25", (2e-3, 4e-2), "topk", "Top-k without memory"),
        ("topk:0.25+ef", (1e-3, 2e-2), "topk", "Error feedback ends far below"),
        ("topk:0.25+ef21", (1e-3, 1e-9), "topk", "EF21 ends at the level"),
    ],
)
def test_other_curves_refute_the_claim(
    channel: str, levels: tuple[float, float], panel: str, text: str
) -> None:
    results = ending_at({**LEVELS, channel: levels})
    assert any(p == panel and t.startswith(text) for p, t in unseen(claims(results)))


def test_no_rounds_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match="rounds is 0"):
        reproduce(tmp_path / "out", rounds=0)
    assert not (tmp_path / "out").exists()


def test_the_problem_is_strongly_convex_and_heterogeneous() -> None:
    known = equal().constants
    np.testing.assert_allclose(known.x_star, 0, atol=1e-12)
    assert 0.25 < known.mu < known.L <= 1
    assert known.G > 0.1


def by_hand(order: str, text: str, seed: int, rounds: int) -> FloatArray:
    """Q-NASTYA and DIANA-NASTYA as the paper writes them, in mean gradients."""
    problem = equal()
    run = compression.run(order, text, seed)
    d, (clients, n) = len(problem.start), (10, 8)
    a, m = problem.curvatures.reshape(clients, n, d), problem.optima.reshape(clients, n, d)
    (through,) = run.chain.transforms
    assert isinstance(through, Channel)
    compressor = through.compressor
    x, h, path, gamma = problem.start.copy(), np.zeros((clients, d)), [], LOCAL / n
    for r in range(rounds):
        cohort, total = run.cohort(r), np.zeros(d)
        ones = np.ones(clients)
        context = ClientContext(seed, r, cohort.clients, ones.astype(np.int64), ones, ones)
        for i, generator in enumerate(context.generators()):
            y = x.copy()
            for (j,) in run.workload.minibatches(i, n, seed, r):
                y -= gamma * a[i, j] * (y - m[i, j])
            g = (x - y) / (gamma * n)
            drawn = compressor.draw(d, generator)
            # Compressors scale with their argument, up to rounding: they may see mean gradients.
            u = torch.from_numpy(-(g - h[i]))[None]
            q = -compressor.compress(u, [drawn])[0][0].numpy()
            total += h[i] + q
            if "diana" in text:
                h[i] += q / (1 + compressor.omega(d))
        x = x - ETA * total / clients
        path.append(x)
    return np.array(path)


@pytest.mark.parametrize("order", METHODS)
@pytest.mark.parametrize("text", ["randk:0.25", "randk:0.25+diana", "qsgd:2+diana"])
def test_runs_are_the_papers_algorithms(order: str, text: str) -> None:
    engine = ReferenceEngine(equal().problem)
    models = trajectory(engine, [compression.run(order, text, SEEDS[0])], 4)
    found = torch.stack([x[0] for x in models])[1:].numpy()
    np.testing.assert_allclose(found, by_hand(order, text, SEEDS[0], 4), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_it_writes_the_figure_the_curves_and_the_claims(tmp_path: Path) -> None:
    found = reproduce(tmp_path / "out", rounds=250, progress=False)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"compression.png", "compression.pdf", "results.json", "claims.md"}
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results) == list(PANELS)
    assert [p for p, _ in unseen(found)] == ["fine"]  # eight bits keep part of the gain


@pytest.mark.slow
def test_results_are_reproducible() -> None:
    assert compute(rounds=3) == compute(rounds=3)
