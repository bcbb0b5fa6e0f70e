"""Local steps per second of each engine, as a ratio to a bare PyTorch loop.

The bare loop copies the weights in, indexes tensors in memory, calls ``loss.backward()`` and
updates in place: no torch.optim, no DataLoader. It and the engines take turns round by round in one
process, one thread, on the same cohorts, and the medians of the ratios are printed: absolute speeds
drift, ratios hardly.

    make bench
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from fedshuffle import Federation, LocalWork, losses
from fedshuffle.engines import Problem, make
from fedshuffle.errors import FedShuffleError
from fedshuffle.state import State
from fedshuffle.training import Run, play

ENGINES = ("loop", "lean", "lanes")


def federation(shape: tuple[int, ...], classes: int, clients: int, mean: float) -> Federation:
    """Random examples over clients of log-normal sizes."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(np.log(mean) - 0.4, 0.9, clients).astype(int), 8, 600)
    n = int(sizes.sum())
    inputs = torch.from_numpy(rng.normal(size=(n, *shape)).astype(np.float32))
    return Federation.from_arrays(
        inputs, torch.from_numpy(rng.integers(classes, size=n)), sizes=sizes
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 62),
    )


def works() -> dict[str, tuple[Callable[[], nn.Module], Federation, int, str]]:
    """Model, federation, batch size and sampling of each work."""
    flat = federation((784,), 62, 200, 64)
    return {
        "digits logreg 64-10": (
            lambda: nn.Linear(64, 10),
            federation((64,), 10, 100, 18),
            8,
            "full",
        ),
        "logreg 784-62": (lambda: nn.Linear(784, 62), flat, 32, "uniform:16"),
        "mlp 784-200-62": (
            lambda: nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 62)),
            flat,
            32,
            "uniform:16",
        ),
        "small cnn": (cnn, federation((1, 28, 28), 62, 50, 32), 32, "uniform:4"),
    }


def bare_round(problem: Problem, run: Run, round: int) -> int:
    """One round by hand; the number of steps."""
    model = copy.deepcopy(problem.load(problem.start))
    parameters = list(model.parameters())
    start = [p.detach().clone() for p in parameters]
    cohort = run.cohort(round)
    for client, steps in zip(cohort.clients.tolist(), cohort.done.tolist(), strict=True):
        with torch.no_grad():
            for p, x in zip(parameters, start, strict=True):
                p.copy_(x)
        for positions in run.workload.stream(client, steps, run.seed, round):
            index = torch.as_tensor(problem.rows(client, positions))
            loss = problem.loss(model, *(field[index] for field in problem.fields))
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for p in parameters:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.05)
                    p.grad = None
    return int(cohort.done.sum())


def ratios(name: str, rounds: int) -> tuple[float, dict[str, float]]:
    """Steps per second of the bare loop, and the median ratio of each engine to it."""
    make_model, clients, batch_size, sampling = works()[name]
    problem = Problem(make_model(), losses.cross_entropy, clients)
    work = LocalWork(epochs=2, batch_size=batch_size)
    run = Run(clients, "fedavg-rr", sampling, work, step_size=0.05)
    engines = {engine: make(engine, problem) for engine in ENGINES}
    bare, found = [], {engine: [] for engine in ENGINES}  # type: ignore[var-annotated]
    for round in range(rounds + 1):
        begun = time.perf_counter()
        steps = bare_round(problem, run, round)
        speed = steps / (time.perf_counter() - begun)
        for name_, engine in engines.items():
            begun = time.perf_counter()
            play(engine, [run], [State(problem.start, {}, round)])
            if round:  # the first round warms up
                found[name_].append(steps / (time.perf_counter() - begun) / speed)
        bare.append(speed)
    return statistics.median(bare), {name: statistics.median(r) for name, r in found.items()}


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    if rounds < 1:
        raise FedShuffleError("give a number of rounds of at least 1.")
    print(f"{'work':24}{'bare steps/s':>14}" + "".join(f"{engine:>10}" for engine in ENGINES))
    for name in works():
        bare, found = ratios(name, rounds)
        print(f"{name:24}{bare:14.0f}" + "".join(f"{found[engine]:10.2f}" for engine in ENGINES))


if __name__ == "__main__":
    main()
