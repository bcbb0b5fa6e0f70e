"""What a Ray cluster costs against worker processes of one machine, both with two workers.

(a) rounds without work: what sending the model and adding the sums takes, for a small model and for
one of 12 million parameters; (b) the LSTM of ``works.py``: steps per second as a ratio, in turns
round by round; (c) the driver's own memory for ever larger cohorts, with a model of four million
parameters; (d) ten million clients. The cluster is one that is started on this machine.

    make bench
    python benchmarks/cluster.py work --rounds 10
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch
from scaling import fresh_peak, peak
from torch import Tensor, nn

from engines import Contestant
from fedshuffle import Federation, LocalWork
from fedshuffle.engines import Engine, Problem, make
from fedshuffle.errors import unknown
from fedshuffle.state import State
from fedshuffle.training.rounds import Run, run_round

RAY, PROCESSES = "ray:2", "sequential:2:processes"


class Vector(nn.Module):
    """A model that is just a vector of this many numbers."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(length))


def first_only(model: Vector, rows: Tensor) -> Tensor:
    """A loss that looks at one of the model's numbers, so that a step costs next to nothing."""
    return (model.x[:1] - rows).square().mean()


def nothing(parameters: int, clients: int) -> tuple[Problem, Run]:
    """One trivial step for each client."""
    rows = np.zeros((clients, 1), dtype=np.float32)
    problem = Problem(
        Vector(parameters), first_only, Federation.from_arrays(rows, sizes=[1] * clients)
    )
    return problem, Run(problem.federation, "fedavg-rr", "full", LocalWork())


def rounds_of(engine: Engine, run: Run, rounds: int) -> Callable[[], list[float]]:
    """Seconds of each round, by turns."""
    start = engine.problem.start

    def once() -> list[float]:
        found = []
        for round in range(rounds):
            begun = time.perf_counter()
            run_round(engine, [run], [State(start, round=round)])
            found.append(time.perf_counter() - begun)
        return found

    return once


def overhead(rounds: int) -> None:
    """Rounds of 16 clients that have nothing to do."""
    print(f"{'parameters':>12}{'sequential':>12}{PROCESSES:>18}{RAY:>10}   ms a round")
    for parameters, turns in ((100, 10 * rounds), (1_000_000, 2 * rounds), (12_000_000, 2)):
        seconds: dict[str, list[float]] = {}
        contestants = {}
        for name in ("sequential", PROCESSES, RAY):
            problem, run = nothing(parameters, 16)
            engine = make(name, problem)
            contestants[name] = rounds_of(engine, run, turns)
            contestants[name]()  # the first ones warm up
        for _ in range(3):
            for name, contestant in contestants.items():
                seconds.setdefault(name, []).extend(contestant())
        cells = [1000 * statistics.median(found) for found in seconds.values()]
        print(f"{parameters:12,}{cells[0]:12.2f}{cells[1]:18.2f}{cells[2]:10.2f}", flush=True)
        engine.close()


def work(rounds: int) -> None:
    """The LSTM: local steps per second of the cluster as a ratio to processes."""
    contestants = {name: Contestant.enter("lstm 2x256", name) for name in (PROCESSES, RAY)}
    for round in range(rounds + 1):
        for contestant in contestants.values():
            contestant.take_turn(round)
    for contestant in contestants.values():
        contestant.leave()
    pairs = list(zip(contestants[RAY].speeds, contestants[PROCESSES].speeds, strict=True))
    ratios = sorted(ray / processes for ray, processes in pairs)
    print(
        f"LSTM, {len(ratios)} rounds: {statistics.median(ratios):.2f} of the speed of {PROCESSES}"
        f" ({ratios[0]:.2f} to {ratios[-1]:.2f}), which is"
        f" {statistics.median(contestants[PROCESSES].speeds):.1f} steps/s",
        flush=True,
    )


def memory(_: int) -> None:
    """The driver's peak memory beyond what it had before, with four million parameters."""
    context = multiprocessing.get_context("spawn")
    print(f"{'clients a round':>16}{'driver, MB':>12}{'ms a round':>12}")
    for clients in (16, 256, 4096):
        ours, theirs = context.Pipe()
        process = context.Process(target=measure, args=(theirs, clients, 2))
        process.start()
        theirs.close()
        megabytes, seconds = ours.recv()
        process.join()
        print(f"{clients:16,}{megabytes:12.0f}{1000 * seconds:12.0f}", flush=True)


def measure(connection: Connection, clients: int, rounds: int) -> None:
    from cluster import nothing  # by the name under which Ray's workers find the model

    problem, run = nothing(4_000_000, clients)
    engine = make(RAY, problem)
    before = fresh_peak()
    seconds = rounds_of(engine, run, rounds)()
    connection.send((peak() - before, statistics.median(seconds[1:])))
    engine.close()


def population(rounds: int) -> None:
    """Ten million clients on the server: what is kept of each, and drawing a thousand of them."""
    context = multiprocessing.get_context("spawn")
    for sampling in ("uniform", "importance"):
        ours, theirs = context.Pipe()
        process = context.Process(target=draw, args=(theirs, f"{sampling}:1000", rounds))
        process.start()
        theirs.close()
        size, set_up, seconds, megabytes = ours.recv()
        process.join()
        print(
            f"{sampling:12}{size:4.0f} bytes a client, set up in {set_up:.1f} s, a draw"
            f" {1000 * seconds:.2f} ms, {megabytes:.0f} MB at the peak",
            flush=True,
        )


def draw(connection: Connection, sampling: str, rounds: int) -> None:
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(np.log(5) - 0.4, 0.9, 10_000_000).astype(int), 1, 200)
    federation = Federation.from_sizes(sizes)
    arrays = (federation.sizes, federation.weights, federation.offsets)
    begun = time.perf_counter()
    run = Run(federation, "fedshuffle", sampling, LocalWork(batch_size=8))
    run.cohort(0)
    set_up, seconds = time.perf_counter() - begun, []
    for round in range(1, rounds + 1):
        begun = time.perf_counter()
        run.cohort(round)
        seconds.append(time.perf_counter() - begun)
    size = sum(array.nbytes for array in arrays) / len(sizes)
    connection.send((size, set_up, statistics.median(seconds), peak()))


TABLES = {"overhead": overhead, "work": work, "memory": memory, "population": population}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", default=list(TABLES))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for table in options.tables:
        if table not in TABLES:
            raise unknown("table", table, TABLES)
        print(f"\n{table}: {TABLES[table].__doc__}")
        TABLES[table](options.rounds)


if __name__ == "__main__":
    main()
