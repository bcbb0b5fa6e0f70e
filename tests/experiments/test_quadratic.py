"""The toy figures: the curves are those of the reference engine, and claims follow from curves."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedshuffle import MVR, Federation, LocalWork, MissLast, losses, methods, train
from fedshuffle.errors import FedShuffleError
from fedshuffle.experiments.claims import Claim
from fedshuffle.experiments.quadratic import Panel, Results, claims, compute, panels, reproduce

FILES = ["figure1.png", "figure1.pdf", "hybrid.png", "hybrid.pdf", "results.json", "claims.md"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("quadratic experiment"),  # what they share is made once
]

METHODS = {
    "full": [
        "fedavg",
        "fedavg-rr",
        "fedavg-min",
        "fedavg-mean",
        "fednova",
        "fednova-rr",
        "fedshuffle",
    ],
    "sum_one": ["fedshuffle-so", "fedshuffle"],
    "importance": ["fedshuffle-uniform", "fedshuffle-importance"],
    "hybrid": ["fednova-rr", "fedshuffle", "fedshuffle-gen"],
}
METHODS["momentum"] = METHODS["full"]


@pytest.fixture(scope="module")
def few() -> Results:
    return compute(rounds=6)


@pytest.fixture(scope="module")
def many() -> list[Claim]:
    return claims(compute(rounds=450))


# The curves ----------------------------------------------------------------------------------


def test_it_writes_figures_curves_and_claims(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = reproduce(tmp_path / "new" / "folder", rounds=20, progress=False)
    assert capsys.readouterr() == ("", "")
    out = tmp_path / "new" / "folder"
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    assert all((out / name).stat().st_size > 0 for name in FILES)
    results = json.loads((out / "results.json").read_text())
    assert {panel: list(curves) for panel, curves in results.items()} == METHODS
    for curves in results.values():
        for curve in curves.values():
            assert sorted(curve) == ["mean", "std"]
            assert len(curve["mean"]) == len(curve["std"]) == 20
            assert np.isfinite(curve["mean"]).all()
            assert min(curve["std"]) >= 0
    document = " ".join((out / "claims.md").read_text().split())
    assert all(claim.text in document and claim.evidence in document for claim in found)


def test_one_round_is_enough(tmp_path: Path) -> None:
    assert reproduce(tmp_path, rounds=1, progress=False)


def test_progress_prints_the_claims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reproduce(tmp_path, rounds=2, progress=True)
    printed = capsys.readouterr().out
    assert "FedShuffle" in printed
    assert "evidence" in printed


def test_results_are_reproducible(few: Results) -> None:
    assert compute(rounds=6) == few


@pytest.mark.parametrize("rounds", [0, -1])
def test_no_rounds_are_refused_before_any_work(tmp_path: Path, rounds: int) -> None:
    with pytest.raises(FedShuffleError, match=f"rounds is {rounds}"):
        reproduce(tmp_path / "out", rounds=rounds)
    assert not (tmp_path / "out").exists()


MOMENTUM = MVR(0.1)
SHORT = LocalWork(interruption=MissLast(1))
# (panel, curve): method, momentum, sizes, sampling, work, step size of the longest client
BY_HAND = {
    ("full", "fedavg"): ("fedavg", None, (1, 2, 3), "full", None, 1 / 240),
    ("full", "fedavg-min"): ("fedavg-min", None, (1, 2, 3), "full", None, 1 / 80),
    ("full", "fedavg-mean"): ("fedavg-mean", None, (1, 2, 3), "full", None, 1 / 160),
    ("full", "fedshuffle"): ("fedshuffle", None, (1, 2, 3), "full", None, 1 / 240),
    ("momentum", "fedavg-min"): ("fedavg-min", MOMENTUM, (1, 2, 3), "full", None, 1 / 80),
    ("momentum", "fednova-rr"): ("fednova-rr", MOMENTUM, (1, 2, 3), "full", None, 1 / 240),
    ("sum_one", "fedshuffle-so"): ("fedshuffle-so", None, (1, 2, 3), "uniform:2", None, 1 / 480),
    ("importance", "fedshuffle-uniform"): (
        "fedshuffle",
        None,
        (8, 1, 1),
        "uniform:1",
        None,
        1 / 4000,
    ),
    ("importance", "fedshuffle-importance"): ("fedshuffle", None, (8, 1, 1), "one", None, 1 / 2400),
    ("hybrid", "fednova-rr"): ("fednova-rr", None, (1, 2, 3), "full", SHORT, 1 / 240),
    ("hybrid", "fedshuffle-gen"): ("fedshuffle-gen", None, (1, 2, 3), "full", SHORT, 1 / 240),
}


@pytest.mark.parametrize("where", BY_HAND, ids="/".join)
def test_curves_are_those_of_single_runs_by_the_reference_engine(
    few: Results, where: tuple[str, str]
) -> None:
    name, momentum, sizes, sampling, work, step_size = BY_HAND[where]
    d = sum(sizes)
    federation = Federation.from_arrays(
        torch.ones(d, 1, dtype=torch.float64), torch.eye(d, dtype=torch.float64), sizes=sizes
    )
    model = nn.Linear(1, d, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)

    def distance(trained: nn.Module) -> Mapping[str, float]:
        x = torch.cat([p.detach().flatten() for p in trained.parameters()])
        return {"distance": float((x - 1 / d).square().sum())}

    runs = [
        train(
            model,
            federation,
            loss=losses.squared_error,
            rounds=6,
            method=methods.get(name).with_momentum(momentum),
            sampling=sampling,
            work=work,
            step_size=step_size,
            seed=seed,
            engine="reference",
            evaluate=distance,
        )
        for seed in (123, 124, 125)
    ]
    table = np.array([[record["distance"] for record in run.history] for run in runs])
    panel, curve = where
    np.testing.assert_allclose(few[panel][curve]["mean"], table.mean(axis=0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(few[panel][curve]["std"], table.std(axis=0), rtol=0, atol=1e-12)


def test_the_bias_is_the_distance_between_the_two_optima() -> None:
    setting = panels()["full"]["fedavg-rr"]
    effective = np.array([1, 4, 4, 9, 9, 9]) / 14 / np.array([1, 2, 2, 3, 3, 3])
    assert setting.bias() == pytest.approx(((effective - 1 / 6) ** 2).sum())
    assert panels()["full"]["fedshuffle"].bias() == pytest.approx(0, abs=1e-20)


# The claims ----------------------------------------------------------------------------------


def falling(to: float, rounds: int = 100) -> dict[str, list[float]]:
    """A made-up curve that falls to a level in a third of the rounds and stays there."""
    pace = 3 * np.log(to * 6) / rounds
    mean = np.maximum(np.exp(pace * np.arange(rounds)) / 6, to)
    return {"mean": mean.tolist(), "std": [0.0] * rounds}


def as_claimed() -> Results:
    """Curves that look as the paper says."""
    levels = {
        "fedavg": 0.017,
        "fedavg-rr": 0.017,
        "fedavg-min": 2e-3,
        "fedavg-mean": 1e-3,
        "fednova": 5e-4,
        "fednova-rr": 5e-7,
        "fedshuffle": 4e-7,
    }
    bias = panels()
    results: Results = {
        "full": {name: falling(level) for name, level in levels.items()},
        "momentum": {name: falling(level / 100) for name, level in levels.items()},
        "sum_one": {
            "fedshuffle-so": falling(bias["sum_one"]["fedshuffle-so"].bias()),
            "fedshuffle": falling(1e-4),
        },
        "importance": {
            "fedshuffle-uniform": falling(1e-3),
            "fedshuffle-importance": falling(1e-4),
        },
        "hybrid": {
            "fednova-rr": falling(1e-4),
            "fedshuffle": falling(bias["hybrid"]["fedshuffle"].bias()),
            "fedshuffle-gen": falling(1e-5),
        },
    }
    # A noisy method goes with its reshuffled counterpart until its own level.
    for panel in ("full", "momentum"):
        curves = results[panel]
        for noisy, quiet in (("fednova", "fednova-rr"), ("fedavg-mean", "fedshuffle")):
            curves[noisy]["mean"] = np.maximum(
                curves[quiet]["mean"], curves[noisy]["mean"][-1]
            ).tolist()
    return results


def unseen(found: list[Claim]) -> list[str]:
    return [claim.text for claim in found if not claim.seen]


def test_curves_as_claimed_show_every_claim() -> None:
    assert unseen(claims(as_claimed())) == []


@pytest.mark.parametrize(
    ("panel", "curve", "replaced", "text"),
    [
        ("full", "fedavg-rr", falling(1e-3), "FedAvgRR saturates"),
        ("full", "fedavg-min", falling(0.017), "FedAvgMin fixes"),
        ("full", "fedavg-min", falling(1e-4), "FedAvgMin is still dominated"),
        ("full", "fednova", falling(0.016), "FedNova performs better"),
        ("full", "fednova", falling(5e-7), "FedNova is later dominated by the noise"),
        ("full", "fedavg-mean", falling(0.016), "FedAvgMean: it performs better"),
        ("full", "fedavg-mean", falling(4e-7), "FedAvgMean is later dominated by the noise"),
        ("full", "fednova-rr", falling(5e-4), "FedNovaRR improves"),
        ("full", "fedshuffle", falling(6e-7), "FedShuffle dominates"),
        ("momentum", "fedavg", falling(0.017), "Momentum helps FedAvg"),
        ("momentum", "fednova", falling(5e-4), "For the other methods momentum"),
        ("momentum", "fedshuffle", falling(1e-8), "FedShuffle still performs the best"),
        ("sum_one", "fedshuffle-so", falling(1e-4), "sum one"),
        ("importance", "fedshuffle-importance", falling(8e-4), "Importance sampling"),
        ("hybrid", "fedshuffle", falling(1e-5), "FedShuffle suffers"),
        ("hybrid", "fedshuffle-gen", falling(0.01), "FedShuffleGen fixes"),
        ("hybrid", "fedshuffle-gen", falling(0.01), "sooner"),
        ("hybrid", "fedshuffle-gen", falling(2e-4), "ends lower"),
    ],
)
def test_other_curves_refute_the_claim(
    panel: str, curve: str, replaced: dict[str, list[float]], text: str
) -> None:
    results = as_claimed()
    results[panel][curve] = replaced
    assert any(text in missed for missed in unseen(claims(results)))


def test_evidence_names_curves_that_still_fall() -> None:
    results = as_claimed()
    for curve in results["full"].values():
        curve["mean"] = curve["mean"][:20]
    (claim,) = [c for c in claims(results) if c.text.startswith("FedAvgRR saturates")]
    assert not claim.seen
    assert re.search(r"FedAvgRR [^,]*still falling", claim.evidence)


def test_a_curve_at_constant_pace_has_not_settled() -> None:
    steady = {"mean": np.exp(-0.01 * np.arange(200)).tolist(), "std": [0.0] * 200}
    curves = {"fedshuffle-so": steady, "fedshuffle": falling(1e-3, 200)}
    panel = Panel("sum_one", curves)
    assert not panel.settled("fedshuffle-so")
    assert panel.settled("fedshuffle")


def test_what_the_paper_says_is_seen(many: list[Claim]) -> None:
    """In fewer than half of the paper's rounds, but for what is about the levels at the end."""
    late = ["FedNova is later", "For the other methods momentum", "sum one", "it ends lower"]
    assert len(many) == 18
    missed = [text for text in unseen(many) if not any(part in text for part in late)]
    assert missed == []


def test_the_evidence_says_that_the_hybrid_moves_further() -> None:
    hybrid = panels()["hybrid"]
    assert hybrid["fedshuffle-gen"].pace() == pytest.approx(1 / 80)
    # FedNova's weights are 2/9, 4/9, 3/9 for 1, 1 and 2 steps of a third of eta.
    assert hybrid["fednova-rr"].pace() == pytest.approx(4 / 9 / 80)
    results = as_claimed()
    results["hybrid"]["fedshuffle-gen"] = falling(2e-4)
    assert "2.25 times as far" in claims(results)[-1].evidence
