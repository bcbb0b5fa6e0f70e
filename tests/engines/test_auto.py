"""How an engine is chosen."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fedshuffle import losses, train
from fedshuffle.engines import Engine, Problem, VectorizedEngine, choose
from fedshuffle.kernel import Answer, LocalTraining
from fedshuffle.models import CharLSTM
from fedshuffle.state import State
from fedshuffle.training import Result
from fedshuffle.training.rounds import Run
from tests.engines.models import SIZES, data, text_data


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshuffle.engines.registry.available_cores", lambda: 2)


def pretend(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Let engines seem to need this many seconds for any request."""

    def took(engine: Engine, request: LocalTraining) -> float:
        kind = type(engine).__name__.removesuffix("Engine")
        return seconds.get(kind, 1.0)

    monkeypatch.setattr("fedshuffle.engines.registry._seconds", took)


@pytest.mark.parametrize(
    ("seconds", "name"),
    [
        ({}, "sequential"),
        ({"Vectorized": 0.95}, "sequential"),  # not worth it
        ({"Vectorized": 0.5}, "vectorized"),
        ({"Threads": 0.55}, "sequential:2"),
        ({"Threads": 0.8, "Processes": 0.6}, "sequential:2:processes"),
        ({"Threads": 1.5, "Processes": 0.95}, "sequential"),
        ({"Vectorized": 0.2, "Threads": 0.1}, "vectorized:2"),
    ],
)
@pytest.mark.usefixtures("two_cores")
def test_the_fastest_engine_is_chosen(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], name: str
) -> None:
    pretend(monkeypatch, **seconds)
    federation = data((6,), 3, SIZES)
    result = train(
        nn.Linear(6, 3), federation, loss=losses.cross_entropy, rounds=2, engine="auto", seed=1
    )
    assert result.engine == name


@pytest.mark.usefixtures("two_cores")
def test_an_engine_that_fails_or_disagrees_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Vectorized=0.1)
    federation = text_data(SIZES)
    problem = Problem(CharLSTM(7, 4, 5), losses.cross_entropy, federation)
    run = Run(federation, "fedshuffle-mvr", "uniform:2")
    request = run.local_training(State(problem.start))
    assert request is not None
    choice = choose(problem, request)
    assert choice.engine.name == "sequential"
    assert "vectorized not (" in choice.why
    assert choice.why.startswith("sequential ")

    monkeypatch.setattr(
        VectorizedEngine,
        "local_training",
        lambda self, requests: [Answer(torch.ones_like(w.start)) for w in requests],
    )
    federation = data((6,), 3, SIZES)
    problem = Problem(nn.Linear(6, 3).double(), losses.cross_entropy, federation)
    request = Run(federation, "fedshuffle").local_training(State(problem.start))
    assert request is not None
    choice = choose(problem, request)
    assert choice.engine.name == "sequential"
    assert "vectorized not (it does not agree with the reference engine)" in choice.why


def test_a_resumed_run_uses_the_engine_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = data((6,), 3, SIZES)

    def go(rounds: int, resume: bool) -> Result:
        torch.manual_seed(0)
        return train(
            nn.Linear(6, 3),
            federation,
            loss=losses.cross_entropy,
            rounds=rounds,
            engine="auto",
            out=tmp_path / "run",
            resume=resume,
            progress=True,
        )

    pretend(monkeypatch, Vectorized=0.1, Threads=1.0)
    assert go(2, resume=False).engine == "vectorized"
    assert "engine vectorized (sequential " in capsys.readouterr().err
    pretend(monkeypatch)
    assert go(4, resume=True).engine == "vectorized"


def test_a_run_without_clients_needs_no_choice() -> None:
    federation = data((6,), 3, SIZES)
    nobody = "independent:1e-9,1e-9,1e-9"
    model = nn.Linear(6, 3)
    loss = losses.cross_entropy
    assert train(model, federation, loss=loss, rounds=1, sampling=nobody, engine="auto").engine == (
        "sequential"
    )
