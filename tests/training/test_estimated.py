"""Training with estimated inclusion probabilities, and FedAU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshuffle import (
    Federation,
    FedShuffleError,
    Privacy,
    Simulation,
    audit,
    losses,
    methods,
    train,
)
from fedshuffle.availability import Markov, Trace
from fedshuffle.cli import main
from fedshuffle.config import load, resume
from fedshuffle.probabilities import BetaRate, TruncatedIntervals
from fedshuffle.training.rounds import Run
from tests.config.project import CONFIG, MODULE

CLIENTS = Federation.from_arrays(torch.ones(10, 1), torch.eye(10), sizes=[1, 2, 3, 4])
CHAIN = Markov([0.45, 0.1, 0.15, 0.05], [0.05, 0.1, 0.35, 0.2])  # there 0.9, 0.5, 0.3, 0.2
SETTINGS: dict[str, Any] = {"loss": losses.squared_error, "step_size": 0.1, "availability": CHAIN}


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(1, 10, bias=False)


def test_weights_are_divided_by_the_estimates() -> None:
    """By counting, from the cohorts that were drawn before; records weight losses by them, too."""
    method = methods.get("fedshuffle").with_probabilities(BetaRate(1, 2))
    run, counts = Run(CLIENTS, method, availability=CHAIN, seed=3), np.zeros(4)
    known = Run(CLIENTS, "fedshuffle", availability=CHAIN, seed=3)
    for round in range(30):
        cohort = run.cohort(round)
        clients = cohort.clients
        np.testing.assert_array_equal(clients, known.cohort(round).clients)
        want = CLIENTS.weights[clients] * (3 + round) / (1 + counts[clients])
        np.testing.assert_allclose(run.method.averaging.aggregation_weights(cohort), want)
        counts[clients] += 1


@pytest.mark.parametrize(
    "rule", ["estimate", "estimate:fedau:3", "estimate:ewma:0.1", "estimate:bayes:1,4"]
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, rule: str) -> None:
    settings = SETTINGS | {"probabilities": rule, "method": "scaffold+fedshuffle"}
    train(model(), CLIENTS, rounds=7, out=tmp_path / "run", **settings)
    resumed = train(model(), CLIENTS, rounds=13, out=tmp_path / "run", resume=True, **settings)
    whole = train(model(), CLIENTS, rounds=13, **settings)
    known = train(model(), CLIENTS, rounds=13, **settings | {"probabilities": None})
    ends = [next(result.model.parameters()) for result in (resumed, whole, known)]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[1], ends[2])
    settings["probabilities"] = "estimate:fedau:4"
    with pytest.raises(FedShuffleError, match="normaliser"):
        train(model(), CLIENTS, rounds=15, out=tmp_path / "run", resume=True, **settings)


def test_a_kept_state_can_be_stepped_from_again() -> None:
    with Simulation(model(), CLIENTS, probabilities="estimate", **SETTINGS) as simulation:
        states = [simulation.init()]
        for _ in range(12):
            states.append(simulation.step(states[-1])[0])
        again, _ = simulation.step(states[4])
        assert torch.equal(again.x, states[5].x)


def test_given_clients_get_the_limit_of_the_estimate() -> None:
    run = Run(CLIENTS, "fedau:cutoff=2", "independent:0.5,0.5,1,0.2")
    p = run.cohort(0, np.arange(4)).probability
    np.testing.assert_allclose(p, np.array([0.5, 0.5, 1, 0.2]) / [0.75, 0.75, 1, 0.36])


# The objective ----------------------------------------------------------------------------------


def settled(method: str, probabilities: str | None, rounds: int = 1500) -> float:
    """The distance of the mean model from the optimum of the objective, 1/10 everywhere."""
    settings = SETTINGS | {"step_size": 0.01, "method": method, "probabilities": probabilities}
    with Simulation(model(), CLIENTS, **settings) as simulation:
        state, mean = simulation.init(), torch.zeros(10)
        for round in range(rounds):
            state, _ = simulation.step(state)
            if round >= rounds // 3:
                mean += state.x / (rounds - rounds // 3)
    return float((mean - 0.1).abs().sum())


@pytest.mark.slow
def test_estimates_lead_to_the_meant_optimum_and_averages_over_cohorts_do_not() -> None:
    """On quadratics, with a Markov chain in which small clients are there more often."""
    estimated = settled("fedshuffle", "estimate")
    cut = settled("fedau+fedshuffle", None)
    assert max(estimated, cut) < 0.4 * settled("fedshuffle-so", None)
    assert settled("fedavg-rr", None) > 2 * estimated


def test_fedau_where_participation_drifts_counts_a_client_too_little() -> None:
    """The closed form of tests/probabilities, of a run: client 1 comes in each of 80 rounds, then
    in every fifth; client 0 is always there.
    """
    h, m, times = 80, 5, 16
    rounds, later = h + m * times, np.arange(h + m - 1, h + m * times, m)
    begins, ends = [0, 0, *later], [rounds, h, *(later + 1)]
    trace = Trace(2, [0, 1, *[1] * times], begins=begins, ends=ends)
    pair = Federation.from_arrays(torch.ones(2, 1), torch.eye(2), sizes=[1, 1])
    run, counted = Run(pair, "fedau", availability=trace), np.zeros(2)
    for round in range(rounds):
        cohort = run.cohort(round)
        counted[cohort.clients] += run.method.averaging.aggregation_weights(cohort)
    lost = h * (m - 1) * sum(1 / k for k in range(h, h + times)) / rounds
    np.testing.assert_allclose(counted, [rounds / 2, rounds / 2 * (1 - lost)])
    assert lost > 0.35

    two = torch.nn.Linear(1, 2, bias=False)
    settings = SETTINGS | {"availability": trace, "rounds": rounds}
    with pytest.warns(UserWarning, match="who takes part changed over the 160 rounds"):
        train(two, pair, method="fedau", **settings)
    train(two, pair, **settings)  # probabilities are known: nothing to warn of


def test_a_run_that_outlasts_its_drift_warns_that_known_probabilities_do_not_fit() -> None:
    pair = Federation.from_arrays(torch.ones(2, 1), torch.eye(2), sizes=[1, 1])
    model = torch.nn.Linear(1, 2, bias=False)
    drift = {"availability": "drifting:0.9,0.2:0.2,0.9:4"}
    # p is 0.55 for both; client 1 then comes in 0.9 of two more rounds, client 0 in 0.2.
    times = (4 + 2 * 0.9 / 0.55) / 6
    with pytest.warns(UserWarning, match=f"client 1 counts {times:.2f} times what you meant"):
        train(model, pair, **SETTINGS | drift | {"rounds": 6})
    for fits in ({"rounds": 4}, {"rounds": 6, "method": "fedavg-rr"}):
        train(model, pair, **SETTINGS | drift | fits)
    for alike in ("cyclic:4:0.5", "drifting:0.9:0.2:4"):
        train(model, pair, **SETTINGS | {"availability": alike, "rounds": 6})


def test_the_audit_says_what_cut_intervals_do() -> None:
    found = audit(CLIENTS, "fedau:cutoff=3+fedshuffle", "independent:0.9,0.5,0.2,0.2")
    want = CLIENTS.weights * (1 - np.array([0.1, 0.5, 0.8, 0.8]) ** 3)
    np.testing.assert_allclose(found.effective_weights, want / want.sum(), rtol=1e-12)
    assert not found.consistent
    assert "estimated" in found.findings[0].what
    assert audit(CLIENTS, "fedau:cutoff=3+fedshuffle", "uniform:2").consistent
    chain = audit(CLIENTS, "fedau+fedshuffle", availability=CHAIN)
    assert chain.consistent is not True
    assert "successive rounds" in chain.how
    counting: dict[str, Any] = {"method": "fedshuffle", "probabilities": "estimate"}
    assert audit(CLIENTS, **counting, availability=CHAIN).consistent
    for there, words in (
        ("cyclic:6:0.5:0,2,4,4", "over many periods of 6 rounds"),
        ("drifting:0.9:0.1,0.9,0.9,0.9", "no estimate can be right"),
    ):
        changing = audit(CLIENTS, **counting, availability=there)
        assert changing.consistent is not True
        assert words in changing.notes[0]


# Names ------------------------------------------------------------------------------------------


def test_fedau_and_its_combinations() -> None:
    assert methods.get("fedau").averaging.estimate == TruncatedIntervals(50)
    mixed = methods.get("fedau:cutoff=9+fedshuffle")
    assert mixed.averaging.step_normalisation is methods.own_steps
    assert mixed.averaging.estimate == TruncatedIntervals(9)
    assert methods.get("fedadam+fedau").averaging == methods.get("fedau").averaging
    same = methods.get("fedshuffle").with_probabilities("estimate:fedau:9")
    assert same.averaging == mixed.averaging


def test_what_has_no_probabilities_to_estimate_is_refused() -> None:
    with pytest.raises(FedShuffleError, match=r"fedavg does not divide.*fedavg\+fedshuffle"):
        train(model(), CLIENTS, rounds=1, method="fedavg", probabilities="estimate", **SETTINGS)
    with pytest.raises(FedShuffleError, match=r"fedau\+fedavg does not divide"):
        methods.get("fedau+fedavg")
    with pytest.raises(FedShuffleError, match=r"leave probabilities out.*as fedshuffle, fedau\.$"):
        methods.get("mifa").with_probabilities("estimate")  # nor does mifa+fedshuffle
    private = Privacy(clip=1.0, noise=1.0)
    with pytest.raises(FedShuffleError, match="estimates inclusion probabilities"):
        train(model(), CLIENTS, rounds=1, method="fedau", privacy=private, **SETTINGS)


def test_from_a_config_and_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    file = tmp_path / "config.toml"
    file.write_text('probabilities = "estimate:fedau:9"\n' + CONFIG)
    config = load(file, {"momentum": "none"})
    found = config.run(tmp_path / "a")
    again = load(file, {"momentum": "none", "probabilities": "estimate"}).run(tmp_path / "b")
    assert found.history[-1]["train_loss"] != again.history[-1]["train_loss"]
    words = ["run", str(file), "--probabilities", "estimate:ewma:0.1", "--out", str(tmp_path / "o")]
    monkeypatch.setattr("sys.argv", ["fedshuffle", *words, "--set", "momentum=none", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert load(tmp_path / "o" / "config.toml").probabilities == "estimate:ewma:0.1"
    assert len(resume(tmp_path / "o", rounds=9).history) == 9
    with pytest.raises(FedShuffleError, match=r"probabilities.*fedau"):
        load(file, {"probabilities": "estimate:fedua"})
