"""Asynchronous schedules: how fast their events are, and how true their closed forms.

    python benchmarks/async_events.py [events | runs | forms | quadratic]

``events``: events per second of CPU time, without training, and the peak memory of 1,000 more.
``runs``: the same with a model of two parameters: updates per second of CPU time, of whole server
steps, and without the local training in them.
``forms``: rate shares and mean staleness weights against a million simulated updates (a fifth where
clients are drawn by the server): the largest difference, and in standard errors.
``quadratic``: where FedAvg and FedShuffle end under FedBuff, on clients that want different points.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from fedshuffle import Federation, LocalWork, audit
from fedshuffle._arrays import FloatArray
from fedshuffle.engines import Engine, Problem, make
from fedshuffle.kernel import Answer, LocalTraining, Request
from fedshuffle.timing import Clock, Exponential, Jitter, LogNormal, NoJitter, Tasks
from fedshuffle.timing import parse_schedule as parse
from fedshuffle.timing.events import Events
from fedshuffle.timing.rates import rate_shares
from fedshuffle.timing.schedule import Asynchronous
from fedshuffle.timing.simulation import simulate
from fedshuffle.timing.staleness import mean_weights
from fedshuffle.training.rounds import Run, drive
from fedshuffle.training.rounds import simulate as train

EVENTS, BATCHES = 100_000, 50
SCHEDULES = (
    "fedasync",
    "fedbuff:K=10,C=100",
    "fedbuff:K=10,C=5000",
    "queued:C=100",
    "shuffled:C=100",
)


def task_times(seconds: FloatArray, jitter: Jitter) -> Tasks:
    work = LocalWork().on(np.ones(len(seconds), dtype=np.int64))
    return Tasks(Clock(seconds, jitter=jitter), work)


def events() -> None:
    for clients in (10_000, 1_000_000):
        rng = np.random.default_rng(0)
        times = task_times(np.exp(rng.normal(size=clients)), LogNormal(0.5))
        for text in SCHEDULES if clients == 10_000 else ("fedbuff:K=10,C=100", "queued:C=100"):
            schedule = parse(text)
            assert isinstance(schedule, Asynchronous)
            made = Events(schedule, clients, 0, partial(times.draw, 0))
            begin = time.process_time()
            made.arrivals(EVENTS // schedule.buffer - 1)
            speed = EVENTS / (time.process_time() - begin)
            tracemalloc.start()
            again = Events(schedule, clients, 0, partial(times.draw, 0))
            again.arrivals(1000 // schedule.buffer)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            print(
                f"{clients} clients, {text}: {speed:,.0f} events/s, {peak / 1e3:,.0f} kB",
                flush=True,
            )


def compared(name: str, means: FloatArray, want: FloatArray) -> None:
    off, errors = np.abs(means.mean(axis=0) - want), means.std(axis=0, ddof=1) / np.sqrt(len(means))
    worst = (off / np.maximum(errors, 1e-12)).max()
    print(f"  {name}: off by {(off / want).max():.1e}, {worst:.1f} standard errors", flush=True)


def forms() -> None:
    seconds = np.exp([0.3, 0.5, 1.1, 1.7, 2.3])
    texts = ("fedasync:a=0.5", "fedbuff:K=3,a=0.5", "fedbuff:K=3,C=3", "queued:C=3", "shuffled:C=7")
    for text in texts:
        for jitter in (Exponential(), LogNormal(1.0), NoJitter()):
            schedule, times = parse(text), task_times(seconds, jitter)
            assert isinstance(schedule, Asynchronous)
            number = 1_000_000 if schedule.loops(5) else 200_000
            found = simulate(schedule, times, 0, number // schedule.buffer // BATCHES * BATCHES)
            print(text, jitter, flush=True)
            who = found.clients.reshape(BATCHES, -1)
            count = np.stack([np.bincount(row, minlength=5) for row in who])
            compared("rates", count / who.shape[1], rate_shares(schedule, times))
            want = mean_weights(schedule, times)
            if schedule.staleness and want is not None:
                by = schedule.weight(found.staleness).reshape(BATCHES, -1)
                pairs = zip(who, by, strict=True)
                sums = np.stack([np.bincount(row, weight, minlength=5) for row, weight in pairs])
                compared("staleness weights", sums / count, want)


class Point(torch.nn.Module):
    """A model that is a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))


def distance(model: Point, wanted: torch.Tensor) -> torch.Tensor:
    return 0.5 * (model.x - wanted).square().sum(1).mean()


def quadratic() -> None:
    sizes = [1, 2, 3, 4]
    wanted = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 2)))
    rows = torch.repeat_interleave(wanted, torch.tensor(sizes), dim=0)
    clients = Federation.from_arrays(rows, sizes=sizes)
    engine = make("reference", Problem(Point(), distance, clients))
    for text in ("fedbuff:K=2,a=0.5", "fedbuff:K=2,C=3,a=0.5", "queued:C=3,a=1"):
        for method in ("fedavg-rr", "fedshuffle"):
            settings: dict[str, Any] = {"schedule": text, "clock": "rates:4,2,1,0.5"}
            audited = audit(clients, method, draws=320_000, **settings).effective_weights
            run = Run(clients, method, step_size=lambda r: 0.05 / (1 + r / 300), **settings)
            states = train(engine, [run], 6000)
            end = torch.stack([state.x for (state,) in states][-3000:]).mean(dim=0)
            meant, said = (
                float((end - torch.tensor(weights) @ wanted).norm())
                for weights in (clients.weights, audited)
            )
            print(
                f"{text} {method}: {meant:.3f} from the meant optimum, {said:.3f} from the audited"
            )


def runs() -> None:
    rows = torch.zeros(10_000, 2, dtype=torch.float64)
    clients = Federation.from_arrays(rows, sizes=[1] * len(rows))
    engine = make("sequential", Problem(Point(), distance, clients))
    for text in SCHEDULES:
        run = Run(clients, "fedshuffle", schedule=text, clock="lognormal:1:1+jitter:lognormal:0.5")
        print(f"{len(rows)} clients, {text}: {whole_run(engine, run, 10_000)}", flush=True)


def whole_run(engine: Engine, run: Run, updates: int) -> str:
    """How many updates per second a run makes, with local training and besides it."""
    training = 0.0

    def answer(request: Request) -> Answer:
        nonlocal training
        assert isinstance(request, LocalTraining)
        begin = time.process_time()
        (found,) = engine.local_training([request])
        training += time.process_time() - begin
        return found

    state = drive(run.round(run.start(engine.problem.start)), answer)  # and the rates, once
    steps = updates // len(run.cohort(0).clients)
    begin, training = time.process_time(), 0.0
    for _ in range(steps):
        state = drive(run.round(state), answer)
    seconds = time.process_time() - begin
    besides = updates / (seconds - training)
    return f"{updates / seconds:,.0f} updates/s, {besides:,.0f} without local training"


if __name__ == "__main__":
    parts: dict[str, Callable[[], None]] = {
        "events": events,
        "runs": runs,
        "forms": forms,
        "quadratic": quadratic,
    }
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("part", choices=parts, nargs="?", help="one of them; without, all")
    chosen = parser.parse_args().part
    for name in [chosen] if chosen else parts:
        parts[name]()
