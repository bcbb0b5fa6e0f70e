"""Training where clients come and go: in Python, from a config, and resumed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedshuffle import (
    Federation,
    FedShuffleError,
    Method,
    Privacy,
    Result,
    Simulation,
    losses,
    methods,
    train,
)
from fedshuffle.availability import Availability, Drifting, Leaving, Markov
from fedshuffle.cli import main
from fedshuffle.config import load, resume
from fedshuffle.sampling import AmongAvailable, Uniform
from fedshuffle.training.rounds import Run
from tests.config.project import CONFIG, MODULE

CLIENTS = Federation.from_arrays(torch.ones(10, 1), torch.eye(10), sizes=[1, 2, 3, 4])
CHAIN = Markov([0.1, 0.3, 0.5, 0.2], [0.3, 0.3, 0.1, 0.2])
SETTINGS: dict[str, Any] = {"loss": losses.squared_error, "step_size": 0.1, "sampling": "uniform:2"}


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(1, 10, bias=False)


def equal(one: Result, other: Result) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_cohorts_are_drawn_among_those_who_are_there() -> None:
    leaving = Leaving(CHAIN, [0.5, 0.0, 0.0, 0.2])
    result = train(
        model(), CLIENTS, rounds=40, availability=leaving, record_cohorts=True, **SETTINGS
    )
    sampling, sizes = AmongAvailable(Uniform(4, 2), leaving), set()
    for round, record in enumerate(result.history):
        cohort = np.array(record["cohort"], dtype=np.int64)
        assert record["cohort"] == sampling.draw(0, round).tolist()
        assert CHAIN.available(0, round, cohort).all()
        sizes.add(len(cohort))
    assert sizes == {0, 1, 2}  # rounds with nobody change nothing, and are no error


@pytest.mark.parametrize("method", methods.available(), ids=lambda method: method.name)
def test_every_method_trains_where_clients_come_and_go(method: Method) -> None:
    settings = SETTINGS | {"method": method, "sampling": "full", "step_size": 1e-3}
    if method.pooled or method.balanced_only:
        with pytest.raises(FedShuffleError, match="full"):
            train(model(), CLIENTS, rounds=3, availability=CHAIN, **settings)
        return
    found = train(model(), CLIENTS, rounds=3, availability=CHAIN, **settings)
    assert all(torch.isfinite(p).all() for p in found.model.parameters())


def test_weights_are_divided_by_the_probability_of_both_together() -> None:
    """One step from zero on quadratics: the update of a round is known."""
    run = Run(CLIENTS, "fedshuffle", "uniform:2", availability=CHAIN)
    cohort = run.cohort(3)
    want = AmongAvailable(Uniform(4, 2), CHAIN).p
    np.testing.assert_array_equal(cohort.probability, want[cohort.clients])
    weights = run.method.averaging.aggregation_weights(cohort)
    np.testing.assert_allclose(weights, CLIENTS.weights[cohort.clients] / cohort.probability)


def test_simulation_takes_it_too_and_a_drift_needs_the_rounds() -> None:
    with Simulation(model(), CLIENTS, availability=CHAIN, **SETTINGS) as simulation:
        assert isinstance(simulation.run.sampling, AmongAvailable)
    with pytest.raises(FedShuffleError, match="a drift goes over the rounds of the run"):
        Simulation(model(), CLIENTS, availability="drifting:0.9:0.1", **SETTINGS)
    text = train(model(), CLIENTS, rounds=5, availability="drifting:0.9:0.1", **SETTINGS)
    made = Drifting(np.full(4, 0.9), np.full(4, 0.1), rounds=5)
    same = train(model(), CLIENTS, rounds=5, availability=made, **SETTINGS)
    assert equal(text, same)


@pytest.mark.parametrize("there", [CHAIN, "drifting:0.9:0.2", "cyclic:4:0.5:0,1,2,3"], ids=str)
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, there: str | Availability
) -> None:
    """Also with more rounds: a drift stays that of the rounds at the start."""
    settings = SETTINGS | {"availability": there, "method": "scaffold"}
    train(model(), CLIENTS, rounds=4, out=tmp_path / "run", **settings)
    resumed = train(model(), CLIENTS, rounds=9, out=tmp_path / "run", resume=True, **settings)
    if isinstance(there, str) and there.startswith("drifting"):
        settings["availability"] = there + ":4"
    whole = train(model(), CLIENTS, rounds=9, **settings)
    assert equal(resumed, whole)


def test_another_availability_does_not_resume(tmp_path: Path) -> None:
    train(model(), CLIENTS, rounds=2, out=tmp_path / "run", availability=CHAIN, **SETTINGS)
    settings = SETTINGS | {"rounds": 4, "out": tmp_path / "run", "resume": True}
    with pytest.raises(FedShuffleError, match="sampling"):
        train(model(), CLIENTS, **settings)
    slower = Markov(CHAIN.on / 2, CHAIN.off / 2)  # there as often, but not at the same time
    with pytest.raises(FedShuffleError, match="other client sizes, weights or sampling"):
        train(model(), CLIENTS, availability=slower, **settings)


def test_availability_amplifies_no_privacy() -> None:
    """Who is there is no secret coin of the server."""
    settings: Any = {"privacy": Privacy(clip=1.0, noise=2.0), "rounds": 5}
    drawn = Run(CLIENTS, "fedshuffle", "uniform:2", **settings)
    there = Run(CLIENTS, "fedshuffle", "uniform:2", availability=CHAIN, **settings)
    assert drawn.mechanism is not None
    assert there.mechanism is not None
    assert drawn.mechanism.budget.amplification == "uniform"
    assert there.mechanism.budget.amplification == "none"


def test_a_client_that_is_never_there_stops_the_run_unless_dropped() -> None:
    with pytest.raises(FedShuffleError, match="client 1 is never available"):
        train(model(), CLIENTS, rounds=1, availability="independent:1,0,1,1", **SETTINGS)
    dropped: dict[str, Any] = {"availability": "independent:1,0,1,1+drop", "record_cohorts": True}
    result = train(model(), CLIENTS, rounds=5, **dropped, **SETTINGS)
    assert all(1 not in record["cohort"] for record in result.history)


def test_from_a_config_and_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    file = tmp_path / "config.toml"
    file.write_text('availability = "trace:week.csv"\nrecord_cohorts = true\n' + CONFIG)
    (tmp_path / "week.csv").write_text("client,begin,end\n0,0,2\n1,1,4\n2,3,5\n0,4,5\n")
    result = load(file, {"momentum": "none"}).run()
    there = [[0], [0, 1], [1], [1, 2], [0, 2], [0], [0, 1]]
    assert [record["cohort"] for record in result.history] == there

    drifting = "drifting:0.9:0.3"
    words = ["run", str(file), "--availability", drifting, "--out", str(tmp_path / "out"), "--json"]
    monkeypatch.setattr("sys.argv", ["fedshuffle", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    kept = load(tmp_path / "out" / "config.toml")
    assert kept.availability == "drifting:0.9:0.3:7"
    more = resume(tmp_path / "out", rounds=9)
    assert len(more.history) == 9

    capsys.readouterr()
    words = ["audit", "--config", str(file), "--momentum", "none", "--method", "fedavg", "--json"]
    monkeypatch.setattr("sys.argv", ["fedshuffle", *words])
    with pytest.raises(SystemExit):
        main()
    found = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(found["inclusion_probabilities"], [0.6, 0.6, 0.4])
