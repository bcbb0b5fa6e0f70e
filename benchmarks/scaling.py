"""What a round costs as the cohort, the imbalance of the clients and the model grow.

Every line is a process of its own, so that its peak memory is its own (read from /proc, so on Linux
only); speeds are ratios to the first line of their table. How the cost depends on the population
stands in ``population.py``.

    make bench
    python benchmarks/scaling.py cohort
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from works import STEP_SIZE, mlp

from fedshuffle import Federation, LocalWork, losses
from fedshuffle.engines import Problem, make
from fedshuffle.errors import unknown
from fedshuffle.training.rounds import Run, run_round


class Case(NamedTuple):
    """A round to be measured."""

    label: str
    engine: str
    clients: int
    hidden: int = 64
    imbalance: float = 0.0
    """Standard deviation of the logarithm of the clients' sizes; their mean stays 64."""
    mean: int = 64
    """Examples of a client."""
    sampling: str = "full"
    method: str = "fedshuffle"
    features: int = 784


def cohort() -> Iterator[Case]:
    """A model of a million parameters, and ever more clients a round."""
    for engine in ("sequential", "sequential:2", "vectorized"):
        for clients in (16, 64, 256, 1024):
            yield Case(f"{engine}, {clients} clients", engine, clients, hidden=1200)


def imbalance() -> Iterator[Case]:
    """The same number of examples, ever more unevenly spread over the clients."""
    for engine in ("sequential:2", "vectorized"):
        for spread in (0.0, 0.5, 1.0, 2.0):
            yield Case(f"{engine}, spread {spread}", engine, 64, imbalance=spread)


def model() -> Iterator[Case]:
    """Where ``vectorized`` stops paying."""
    for hidden in (4, 32, 256, 1200):
        for engine in ("sequential", "vectorized"):
            yield Case(f"{hidden * 847 + 62:,} parameters, {engine}", engine, 64, hidden)


def client_state() -> Iterator[Case]:
    """SCAFFOLD, which keeps a vector for every client: 10,000 parameters, 200,000 clients."""
    for cohort in (200, 2000):
        for engine in ("sequential", "vectorized"):
            yield Case(
                f"{cohort:,} clients, {engine}",
                engine,
                200_000,
                hidden=88,
                mean=4,
                sampling=f"uniform:{cohort}",
                method="scaffold",
                features=50,
            )


TABLES = {"cohort": cohort, "imbalance": imbalance, "model": model, "client_state": client_state}


def measure(connection: Connection, case: Case, rounds: int) -> None:
    """The median of steps per second, and the peak memory in megabytes."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    draws = rng.lognormal(-(case.imbalance**2) / 2, case.imbalance, case.clients)
    sizes = np.maximum(1, (case.mean * draws / draws.mean()).astype(np.int64))
    n = int(sizes.sum())
    rows = rng.normal(size=(n, case.features)).astype(np.float32)
    federation = Federation.from_arrays(rows, rng.integers(62, size=n), sizes=sizes)
    del rows
    problem = Problem(mlp(case.hidden, case.features), losses.cross_entropy, federation)
    before = fresh_peak()
    work = LocalWork(epochs=1, batch_size=32)
    run = Run(federation, case.method, case.sampling, work, STEP_SIZE)
    engine, state = make(case.engine, problem), run.start(problem.start)
    speeds = []
    for round in range(rounds + 1):
        begun = time.perf_counter()
        (state,) = run_round(engine, [run], [replace(state, x=problem.start, round=round)])
        speeds.append(run.cohort(round).done.sum() / (time.perf_counter() - begun))
    connection.send((statistics.median(speeds[1:]), peak() - before))


def fresh_peak() -> float:
    """Forget how much memory was used so far; what is used now, in megabytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> float:
    status = Path("/proc/self/status").read_text()
    return next(
        int(line.split()[1]) / 1024 for line in status.split("\n") if line.startswith("VmHWM:")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", default=list(TABLES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for table in options.tables:
        if table not in TABLES:
            raise unknown("table", table, TABLES)
        print(f"\n{table}: {TABLES[table].__doc__}")
        print(f"{'':34}{'steps/s':>10}{'ratio':>8}{'memory of training':>20}")
        first = 0.0
        for case in TABLES[table]():
            ours, theirs = context.Pipe()
            process = context.Process(target=measure, args=(theirs, case, options.rounds))
            process.start()
            speed, megabytes = ours.recv()
            process.join()
            first = first or speed
            print(f"{case.label:34}{speed:10.0f}{speed / first:8.2f}{megabytes:17.0f} MB")


if __name__ == "__main__":
    main()
