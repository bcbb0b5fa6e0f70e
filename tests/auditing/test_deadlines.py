"""The audit of deadlines and of over-selection: exact against enumeration."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedshuffle import Federation, LocalWork, audit
from fedshuffle.auditing.effective_weights import monte_carlo
from fedshuffle.auditing.subject import Subject
from fedshuffle.cli import app
from fedshuffle.errors import FedShuffleError
from fedshuffle.local_work import EpochRange
from fedshuffle.methods import get
from fedshuffle.sampling import Full, scheduled
from fedshuffle.timing import Clock, Exponential, LogNormal, MessageSizes, Timing
from tests.brute import Floats

CLIENTS = Federation.from_sizes([1, 2, 3])
CLOCK = Clock([0.5, 0.4, 0.3], jitter=Exponential())
SCHEDULES = ["deadline:1", "deadline:1+partial", "over:1of2", "over:2of3"]


def enumerated(outcomes: list[dict[tuple[int, int], float]]) -> Floats:
    """Of FedAvg: of each client the chances of (planned, done); nothing else is late."""
    total = np.zeros(3)
    absent = [1 - sum(client.values()) for client in outcomes]
    every = [[*client.items(), (None, gone)] for client, gone in zip(outcomes, absent, strict=True)]
    for combination in itertools.product(*every):
        chance = np.prod([q for _, q in combination])
        there = [i for i, (steps, _) in enumerate(combination) if steps is not None]
        for i in there:
            steps = combination[i][0]
            assert steps is not None
            total[i] += chance * CLIENTS.sizes[i] / CLIENTS.sizes[there].sum() * steps[1]
    found: Floats = total / total.sum()
    return found


def chance(client: int, steps: int) -> float:
    return float(1 - np.exp(-1 / (CLOCK.seconds[client] * steps)))


def test_fedavg_with_a_deadline() -> None:
    want = enumerated([{(k, k): chance(k - 1, k)} for k in (1, 2, 3)])
    found = audit(CLIENTS, "fedavg-rr", clock=CLOCK, schedule="deadline:1")
    assert found.exact
    np.testing.assert_allclose(found.effective_weights, want, rtol=1e-7)


def test_fedavg_with_a_deadline_and_random_epochs() -> None:
    """A client that is in time has rather planned few steps."""
    work = LocalWork(epochs=EpochRange(1, 2))
    want = enumerated(
        [{(e * k, e * k): chance(k - 1, e * k) / 2 for e in (1, 2)} for k in (1, 2, 3)]
    )
    found = audit(CLIENTS, "fedavg-rr", work=work, clock=CLOCK, schedule="deadline:1")
    assert found.exact
    np.testing.assert_allclose(found.effective_weights, want, rtol=1e-7)


@pytest.mark.parametrize("epochs", [1, EpochRange(1, 2)])
def test_fedavg_with_partial_work(epochs: int | EpochRange) -> None:
    outcomes = []
    for size in (1, 2, 3):
        client: dict[tuple[int, int], float] = {}
        for e in (1,) if epochs == 1 else (1, 2):
            planned, share = e * size, 1.0 if epochs == 1 else 0.5
            for done in range(1, planned + 1):
                more = chance(size - 1, done + 1) if done < planned else 0.0
                client[planned, done] = share * (chance(size - 1, done) - more)
        outcomes.append(client)
    settings = {"work": LocalWork(epochs=epochs), "clock": CLOCK}
    found = audit(CLIENTS, "fedavg-rr", schedule="deadline:1+partial", **settings)  # type: ignore[arg-type]
    assert found.exact
    np.testing.assert_allclose(found.effective_weights, enumerated(outcomes), rtol=1e-7)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("epochs", [1, EpochRange(1, 2)])
def test_fedshuffle_is_consistent(schedule: str, epochs: int | EpochRange) -> None:
    method = "fedshuffle-gen" if "partial" in schedule else "fedshuffle"
    work = LocalWork(epochs=epochs)
    found = audit(CLIENTS, method, work=work, clock=CLOCK, schedule=schedule)
    assert found.consistent
    assert found.exact


@pytest.mark.parametrize("schedule", ["deadline:1+partial", "over:2of3"])
def test_draws_agree(schedule: str) -> None:
    """The audit that samples gives the exact weights, so it draws cohorts as training does."""
    clock, work = Clock([0.5, 0.4, 0.3], jitter=LogNormal(0.5)), LocalWork(epochs=EpochRange(1, 2))
    timing, method = Timing.of(schedule, clock, CLIENTS), get("fedshuffle")
    sampling, workload = scheduled(Full(3), timing, work.on(CLIENTS.sizes), CLIENTS.ids)
    exact = audit(CLIENTS, method, work=work, clock=clock, schedule=schedule).effective_weights
    raw, errors = monte_carlo(Subject(CLIENTS, method, sampling, workload), 0, 960)
    assert (np.abs(raw / raw.sum() - exact) < 5 * errors).all()


@pytest.mark.parametrize(
    ("method", "schedule", "words"),
    [
        ("fedavg-rr", "deadline:1", "client 0 is in time in 86% of its rounds, client 2 in 67%"),
        ("fedavg-rr", "over:1of2", "Only the first 1 of 2 clients count: of its rounds client 0"),
        ("fedshuffle", "deadline:1+partial", "by the deadline client 2 has done"),
    ],
)
def test_findings_say_who_is_dropped(method: str, schedule: str, words: str) -> None:
    found = audit(CLIENTS, method, clock=CLOCK, schedule=schedule)
    [finding] = [one for one in found.findings if words in one.what]
    assert "fedshuffle" in finding.fix


def test_bytes_make_clients_late() -> None:
    command = ["audit", "--sizes", "1,1", "--schedule", "deadline:1", "--json"]
    command += ["--clock", "fixed:0.5+up:10,1000+jitter:exponential"]
    for sizes, want in (("0,0", [0.865, 0.865]), ("0,5", [0.632, 0.863])):
        answer = CliRunner().invoke(app, [*command, "--message-bytes", sizes])
        found = json.loads(answer.stdout)["inclusion_probabilities"]
        np.testing.assert_allclose(found, want, atol=5e-4)


@pytest.mark.parametrize("schedule", ["deadline:5", "fedasync", "over:1of2"])
def test_bandwidths_need_the_bytes_of_messages(schedule: str) -> None:
    with pytest.raises(FedShuffleError, match="nothing says how long messages are"):
        audit(
            Federation.from_sizes([1, 1]), "fedshuffle", schedule=schedule, clock="fixed:1+up:9,1"
        )


@pytest.mark.parametrize("size", [-1.0, float("nan"), float("inf")])
def test_bytes_that_are_no_lengths_are_refused(size: float) -> None:
    """NaN and infinity were waited for without end."""
    clients = Federation.from_sizes([1, 1])
    settings: dict[str, Any] = {"schedule": "fedasync", "clock": "fixed:1+up:9"}
    with pytest.raises(FedShuffleError, match=r"message sizes, up: .* must be in \[0, inf\)"):
        audit(clients, "fedshuffle", **settings, message_sizes=MessageSizes(up=size))
    command = ["audit", "--sizes", "1,1", "--schedule", "fedasync", "--clock", "fixed:1+up:9"]
    answer = CliRunner().invoke(app, [*command, "--message-bytes", f"0,{size}"])
    assert "give the bytes down and up" in str(answer.exception)


@pytest.mark.parametrize(("option", "value"), [("--rates", "4,1"), ("--clock", "fixed:1")])
def test_clocks_without_a_schedule_are_refused(option: str, value: str) -> None:
    answer = CliRunner().invoke(app, ["audit", "--sizes", "1,1", option, value])
    assert answer.exit_code != 0
    assert f"{option} changes nothing" in answer.stderr + str(answer.exception)
