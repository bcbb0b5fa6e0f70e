"""The theory's figure: measured is what closed forms say, and claims follow from numbers."""

import copy
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedshuffle._arrays import FloatArray
from fedshuffle.cli import app
from fedshuffle.experiments.claims import Claim
from fedshuffle.experiments.theory.experiment import (
    COHORT,
    SERVER,
    SHARE,
    Results,
    Scale,
    cohort,
    compute,
    sampling,
)
from fedshuffle.experiments.theory.report import claims, reproduce, slope
from fedshuffle.experiments.toy_problems import Quadratics, alike, apart, many, similar
from fedshuffle.sampling import importance_probabilities

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("theory experiment"),  # what they share is made once
]

PREDICTED = ("distance", "sampling", "gradient")
SMALL = Scale(
    seeds=2,
    halvings=2,
    cohorts=(8, 16),
    epsilon=0.008,
    server_step_sizes=(1, 4),
    deltas=(0.2, 0.05),
    gradient=0.1,
    multiples=(32,),
    rounds=30,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Claim], Results]:
    out = tmp_path_factory.mktemp("theory") / "new" / "folder"
    found = reproduce(out, SMALL, progress=False)
    return out, found, json.loads((out / "results.json").read_text())


# Stationary errors in closed form ------------------------------------------------------------


def clients(chosen: Quadratics) -> list[tuple[FloatArray, FloatArray]]:
    """Curvatures and optima of each client."""
    ends = np.cumsum(chosen.sizes)[:-1]
    a, m = chosen.curvatures[:, 0], chosen.optima
    return list(zip(np.split(a, ends), np.split(m, ends), strict=True))


def reshuffled(chosen: Quadratics, eta_l: float, eta_g: float = 1.0) -> float:
    """E |x|^2 in the long run: an epoch is an affine map, and all orders can be listed."""
    total = sum(chosen.sizes)
    keep, shift, variance = 0.0, np.zeros(chosen.optima.shape[1]), 0.0
    for a, m in clients(chosen):
        step, w = eta_l / len(a), len(a) / total
        ends = []
        for order in itertools.permutations(range(len(a))):
            b = np.zeros(m.shape[1])
            for j in order:
                b = b - step * a[j] * (b - m[j])
            ends.append(b)
        mean = np.mean(ends, axis=0)
        keep += w * float(np.prod(1 - step * a))
        shift += w * mean
        variance += w**2 * float(((np.array(ends) - mean) ** 2).sum(axis=1).mean())
    # x <- x + eta_g (keep x + shift + noise - x)
    rho = 1 + eta_g * (keep - 1)
    fixed = eta_g * shift / (1 - rho)
    return float(fixed @ fixed) + eta_g**2 * variance / (1 - rho**2)


def replaced(chosen: Quadratics, eta_l: float, eta_g: float = 1.0) -> float:
    """The same with replacement: y = R x + b with random R and b, step by step in moments.

    The optimum of both problems is the origin, so that E b = 0 if all clients are alike; in general
    the mean of x is found first.
    """
    total = sum(chosen.sizes)
    d = chosen.optima.shape[1]
    r1, b1 = 0.0, np.zeros(d)
    parts = []
    for a, m in clients(chosen):
        step, w = eta_l / len(a), len(a) / total
        kept, pull = 1 - step * a, step * a[:, None] * m
        er, err, eb, erb, ebb = 1.0, 1.0, np.zeros(d), np.zeros(d), 0.0
        square, cross = float((kept**2).mean()), (kept[:, None] * pull).mean(axis=0)
        for _ in range(len(a)):
            ebb = square * ebb + 2 * float(cross @ eb) + float((pull**2).sum(axis=1).mean())
            erb = square * erb + cross * er
            err, er, eb = square * err, kept.mean() * er, kept.mean() * eb + pull.mean(axis=0)
        r1, b1 = r1 + w * er, b1 + w * eb
        parts.append((w, err - er**2, erb - er * eb, ebb - float(eb @ eb)))
    rho, shift = 1 + eta_g * (r1 - 1), eta_g * b1
    mean = shift / (1 - rho)
    # E|x+|^2 = rho^2 E|x|^2 + 2 rho mean.shift + |shift|^2 + the variances of the clients' updates
    slope_e = rho**2 + eta_g**2 * sum(w**2 * v for w, v, _, _ in parts)
    rest = 2 * rho * float(mean @ shift) + float(shift @ shift)
    rest += eta_g**2 * sum(w**2 * (2 * float(mean @ c) + v) for w, _, c, v in parts)
    return rest / (1 - slope_e)


def test_the_claimed_slopes_are_those_of_the_closed_forms() -> None:
    chosen = alike()
    etas = [0.0678 / 2**k for k in range(4)]
    assert slope(etas, [reshuffled(chosen, eta) for eta in etas]) == pytest.approx(2, abs=0.2)
    assert slope(etas, [replaced(chosen, eta) for eta in etas]) == pytest.approx(1, abs=0.1)
    # Without a bias, that is, with equal curvatures, reshuffling would be better still.
    even = Quadratics(
        chosen.sizes,
        np.ones((12, 1)),
        np.concatenate([m - m.mean(axis=0) for _, m in clients(chosen)]),
        chosen.start,
    )
    assert slope(etas, [reshuffled(even, eta) for eta in etas]) == pytest.approx(3, abs=0.2)
    servers, drifting = [1, 2, 4, 8], apart()
    errors = [reshuffled(drifting, 0.068 / g, g) for g in servers]
    assert slope(servers, errors) == pytest.approx(-2, abs=0.1)
    errors = [replaced(drifting, 0.068 / g, g) for g in servers]
    assert slope(servers, errors) == pytest.approx(0, abs=0.1)


def test_errors_are_those_of_the_closed_forms(
    small: tuple[Path, list[Claim], Results],
) -> None:
    results = small[2]
    noise, server = results["noise"], results["server"]
    for k, eta in enumerate(noise["x"]):
        # A few directions carry the noise: two seeds tell it within a factor of about two.
        exact = replaced(alike(), eta)
        assert exact / 2 < noise["curves"]["with replacement"][k] < exact * 2
        exact = reshuffled(alike(), eta)
        assert exact / 2 < noise["curves"]["reshuffled"][k] < exact * 2
    effective = server["facts"]["effective step"]
    for k, eta_g in enumerate(server["x"]):
        exact = reshuffled(apart(), effective / eta_g, eta_g)
        assert server["curves"]["reshuffled"][k] == pytest.approx(exact, rel=0.2)
        exact = replaced(apart(), effective / eta_g, eta_g)
        assert server["curves"]["with replacement"][k] == pytest.approx(exact, rel=0.4)


def errors_in_expectation(b: int, eta: float) -> Iterator[float]:
    """E|x|^2 after each round of importance sampling.

    With every client's epoch as one affine map (its order hardly counts),
    E|x+|^2 = |E x+|^2 + eta_g^2 sum_i w_i^2 (1/p_i - 1) E|u_i|^2, for the update u_i of client i.
    """
    chosen = many()
    sizes = np.array(chosen.sizes)
    w = sizes / sizes.sum()
    p = importance_probabilities(sizes, b)
    own = np.array([m.mean(axis=0) for _, m in clients(chosen)])
    keep = (1 - eta / SERVER / sizes) ** sizes
    x, spread = chosen.start, 0.0  # the mean of x, and E|x - mean|^2
    while True:
        updates = (1 - keep)[:, None] * (own - x)
        chance = SERVER**2 * w**2 * (1 / p - 1)
        rho = 1 - SERVER * float(w @ (1 - keep))
        fresh = float(chance @ ((updates**2).sum(axis=1) + (1 - keep) ** 2 * spread))
        spread = rho**2 * spread + fresh
        x = x + SERVER * w @ updates
        yield float(x @ x) + spread


def rounds_in_expectation(b: int, eta: float, epsilon: float) -> int:
    """The first round with such an error; 3000 for none before it."""
    errors = enumerate(itertools.islice(errors_in_expectation(b, eta), 2999), start=1)
    return next((r for r, error in errors if error <= epsilon), 3000)


def test_rounds_are_those_of_the_expectation() -> None:
    panel = cohort(Scale(seeds=8, cohorts=(8, 16), epsilon=0.008))
    facts = panel["facts"]
    for k, b in enumerate(panel["x"]):
        eta = 0.008 * facts["mu"] / (facts["M"]["importance"][k] * facts["G"] ** 2)
        expected = rounds_in_expectation(b, eta, 0.008)
        assert panel["curves"]["importance"][k] == pytest.approx(expected, rel=0.2)


def test_the_speed_up_is_linear_in_expectation() -> None:
    bs = [1, 2, 4, 8, 16]
    w_min = 1 / sum(many().sizes)
    square = many().constants.G ** 2
    rounds = [rounds_in_expectation(b, 0.004 * b / ((1 - b * w_min) * square), 0.004) for b in bs]
    assert slope(bs, rounds) == pytest.approx(-1, abs=0.1)
    # The steps are as large as they may be: with somewhat more, the noise would be in the way.
    assert rounds_in_expectation(4, 2.2 * 0.004 * 4 / ((1 - 4 * w_min) * square), 0.004) == 3000


# Bounds over rounds --------------------------------------------------------------------------


def test_the_expectation_is_what_is_measured_and_under_the_bound() -> None:
    panel = sampling(Scale(seeds=16, rounds=60))
    assert panel["x"] == list(range(1, 61))
    eta = panel["facts"]["step sizes"]["importance"] * SERVER * max(many().sizes)
    expected = np.array(list(itertools.islice(errors_in_expectation(COHORT, eta), 60)))
    bound = np.array(panel["bounds"]["importance"])
    assert (expected <= bound).all()
    np.testing.assert_allclose(panel["curves"]["importance"], expected, rtol=0.15)
    assert bound[-1] < 0.2  # and it says something
    assert panel["bounds"]["uniform"][-1] > 1.5 * bound[-1]


def test_gradients_are_running_means(small: tuple[Path, list[Claim], Results]) -> None:
    panel = small[2]["gradient"]
    assert list(panel["curves"]) == list(panel["bounds"]) == ["FedShuffle", "FedShuffleMVR"]
    for name, curve in panel["curves"].items():
        assert curve[0] == pytest.approx(1)  # of the start, the same for all seeds
        assert panel["deviations"][name][0] == pytest.approx(0)
        assert curve[-1] < 0.9


# The problems --------------------------------------------------------------------------------


def test_the_problems_are_what_their_panels_need() -> None:
    for chosen in (alike(), apart(), many(), similar(0.2)):
        np.testing.assert_allclose(chosen.constants.x_star, 0, atol=1e-12)
    known = alike().constants
    assert pytest.approx(0, abs=1e-12) == known.G
    assert (known.sigma > 1).all()
    known = apart().constants
    assert known.G > 0.1
    assert known.delta > 0.1
    known = many().constants
    assert (known.L, known.mu, known.B) == pytest.approx((1, 1, 1))
    assert 16 * max(many().sizes) < sum(many().sizes)  # no probability is capped
    assert float((many().start ** 2).sum()) == pytest.approx(1)


@pytest.mark.parametrize("delta", Scale().deltas)
def test_hessians_differ_by_delta_and_smoothness_stays(delta: float) -> None:
    chosen = similar(delta)
    known = chosen.constants
    assert known.delta == pytest.approx(delta)
    assert pytest.approx(1) == known.L
    assert known.mu > 0
    assert 0.005 * ((chosen.hessian * chosen.start) ** 2).sum() > known.G**2
    np.testing.assert_allclose(chosen.hessian, 2.0 ** -np.arange(9))
    assert pytest.approx(0.72) == SHARE


# The command and the claims ------------------------------------------------------------------


def test_it_writes_figures_numbers_and_claims(
    small: tuple[Path, list[Claim], Results],
) -> None:
    out, found, results = small
    names = ["theory.png", "theory.pdf", "bounds.png", "bounds.pdf", "results.json", "claims.md"]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    assert all(path.stat().st_size > 0 for path in out.iterdir())
    assert list(results) == ["noise", "cohort", "server", "similarity", *PREDICTED]
    for panel in results.values():
        assert all(len(curve) == len(panel["x"]) for curve in panel["curves"].values())
    document = " ".join((out / "claims.md").read_text().split())
    assert all(claim.text in document and claim.evidence in document for claim in found)


def test_what_needs_few_seeds_is_seen(small: tuple[Path, list[Claim], Results]) -> None:
    # The bound on a round of sampling is so close at first that two seeds may well be above it.
    many_needed = ("noise", "sampling")
    missed = [claim for claim in small[1] if not claim.seen and claim.panel not in many_needed]
    assert missed == []


def test_steps_are_within_the_theorem(small: tuple[Path, list[Claim], Results]) -> None:
    results = small[2]
    shares = results["cohort"]["facts"]["share of the limit"]
    assert max(shares["importance"] + shares["uniform"]) <= 2  # at twice the full scale's epsilon
    assert results["noise"]["x"][0] == results["noise"]["facts"]["largest eta_l"]
    assert results["similarity"]["facts"]["E"] == [5, 20]


TINY = Scale(1, 1, (16,), 0.1, (8,), (0.4,), 0.5, (64,), 3)


def test_the_command_gives_the_same_numbers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedshuffle.experiments.theory.experiment.Scale", lambda: TINY)
    result = CliRunner().invoke(app, ["reproduce", "theory", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "FedShuffleMVR" in result.output
    assert json.loads((tmp_path / "results.json").read_text()) == compute(TINY)


def as_claimed() -> Results:
    """Numbers that are as the theory says."""
    shares = {"importance": [0.1, 0.2], "uniform": [0.1, 0.1]}
    return {
        "noise": {
            "x": [0.1, 0.05],
            "curves": {"reshuffled": [4e-4, 1e-4], "with replacement": [0.2, 0.1]},
            "bound": [0.4, 0.1],
        },
        "cohort": {
            "x": [1, 2],
            "curves": {"importance": [100, 50], "uniform": [300, 150]},
            "facts": {"share of the limit": shares, "M": {"importance": [1], "uniform": [3]}},
        },
        "server": {
            "x": [1, 2],
            "curves": {"reshuffled": [4e-4, 1e-4], "with replacement": [0.2, 0.2]},
            "bound": [0.4, 0.1],
        },
        "similarity": {
            "x": [0.5, 0.05],
            "curves": {
                "FedShuffleMVR, theorem": [100, 10],
                "non-local MVR, theorem": [200, 200],
                "FedShuffleMVR, best": [10, 2],
                "non-local MVR, best": [20, 20],
            },
        },
        **{
            name: {"x": [1, 2], "curves": {"a": [0.5, 0.1]}, "bounds": {"a": [0.6, 0.4]}}
            for name in PREDICTED
        },
    }


def test_numbers_as_claimed_show_every_claim() -> None:
    found = claims(as_claimed())
    assert len(found) == 15
    assert all(claim.seen for claim in found)


@pytest.mark.parametrize(
    ("panel", "curve", "replaced", "text"),
    [
        ("noise", "reshuffled", [2e-4, 1e-4], "goes with eta^2"),
        ("noise", "with replacement", [0.4, 0.1], "goes with eta only"),
        ("noise", "reshuffled", [0.8, 0.2], "under the theorem's bound"),
        ("cohort", "importance", [100, 80], "linear speed-up"),
        ("cohort", "importance", [100, None], "linear speed-up"),
        ("cohort", "uniform", [150, 80], "fewer rounds than uniform"),
        ("cohort", "uniform", [None, None], "fewer rounds than uniform"),
        ("server", "reshuffled", [4e-4, 4e-4], "The middle term vanishes"),
        ("server", "with replacement", [0.2, 0.1], "the noise stays"),
        ("server", "reshuffled", [0.8, 0.2], "under the theorem's bound"),
        ("similarity", "FedShuffleMVR, theorem", [100, 100], "go with delta"),
        ("similarity", "non-local MVR, theorem", [200, 20], "do not"),
        ("similarity", "FedShuffleMVR, theorem", [100, 150], "at the theorem's step sizes"),
        ("similarity", "FedShuffleMVR, best", [10, 15], "at the best found"),
        ("similarity", "FedShuffleMVR, best", [10, None], "at the best found"),
        ("distance", "a", [0.5, 0.5], "stays under the bound in every round"),
        ("gradient", "a", [0.7, 0.1], "stays under the bound in every round"),
    ],
)
def test_other_numbers_refute_the_claim(
    panel: str, curve: str, replaced: list[Any], text: str
) -> None:
    results = copy.deepcopy(as_claimed())
    results[panel]["curves"][curve] = replaced
    assert any(text in claim.text for claim in claims(results) if not claim.seen)


def test_a_goal_that_is_never_reached_has_no_slope() -> None:
    assert math.isnan(slope([1, 2], [3, None]))
    assert math.isnan(slope([1], [3]))
