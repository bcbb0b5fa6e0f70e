"""Local steps per second of each engine, as a ratio to a bare PyTorch loop.

The bare loop copies the weights in, indexes tensors in memory, calls ``loss.backward()`` and
updates in place: no torch.optim, no DataLoader. Every contestant is a process of its own with one
thread (engines with workers: one each), so that none profits from the memory settings of another;
they take turns, round by round, on the same cohorts. Printed are the medians of the ratios and the
peak memory: absolute speeds drift, ratios hardly.

    make bench
    python benchmarks/engines.py --works "small cnn" --engines sequential sequential:2 --rounds 20

An engine may be followed by a transform: ``sequential@clip:0.1``, ``sequential@topk:0.01+ef``.
"""

import argparse
import copy
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from works import STEP_SIZE, WORKS

from fedshuffle.engines import Problem, make
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.privacy import Clip
from fedshuffle.training.rounds import Run, run_round
from fedshuffle.transforms import Transform, channel

ENGINES = ("sequential", "vectorized")


def bare_round(problem: Problem, run: Run, round: int) -> None:
    """One round by hand, the way one would write it."""
    model = copy.deepcopy(problem.load(problem.start))
    parameters = list(model.parameters())
    start = [p.detach().clone() for p in parameters]
    cohort, batch_size = run.cohort(round), run.workload.batch_size
    rng = np.random.default_rng(round)
    total = [torch.zeros_like(p) for p in parameters]
    for client in cohort.clients.tolist():
        with torch.no_grad():
            for p, x in zip(parameters, start, strict=True):
                p.copy_(x)
        size = int(problem.federation.sizes[client])
        for _ in range(2):
            rows = torch.from_numpy(problem.rows(client, rng.permutation(size)))
            for index in torch.split(rows, batch_size):
                loss = problem.loss(model, *(field[index] for field in problem.fields))
                loss.backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    for p in parameters:
                        if p.grad is not None:
                            p.sub_(p.grad, alpha=STEP_SIZE)
                        p.grad = None
        with torch.no_grad():
            for t, p, x in zip(total, parameters, start, strict=True):
                t.add_(p - x)


def transforms(text: str) -> list[Transform]:
    """The transforms that a text names."""
    if not text:
        return []
    name, _, threshold = text.partition(":")
    if name == "clip":
        return [Clip(float(threshold))]
    found = channel(text)
    return [] if found is None else [found]


def contestant(connection: Connection, work: str, engine: str) -> None:
    """A process that plays the rounds it is told to, and says how long each took."""
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    engine, _, transform = engine.partition("@")
    problem, runs = WORKS[work].build(transforms(transform))
    runner = None if engine == "bare" else make(engine, problem)
    states = [run.start(problem.start) for run in runs]
    if runner is not None:  # a model that it cannot run is found out here
        run_round(runner, runs, states)
    connection.send("ready")
    while True:
        round = connection.recv()
        if round is None:
            break
        begun = time.perf_counter()
        if runner is None:
            for run in runs:
                bare_round(problem, run, round)
        else:
            now = [replace(state, x=problem.start, round=round) for state in states]
            states = run_round(runner, runs, now)
        seconds = time.perf_counter() - begun
        steps = sum(int(run.cohort(round).done.sum()) for run in runs)
        connection.send((steps, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


@dataclass
class Contestant:
    """A contestant, seen from the referee."""

    process: Any
    connection: Any
    speeds: list[float]
    megabytes: float = 0.0

    @classmethod
    def enter(cls, work: str, engine: str) -> "Contestant":
        context = multiprocessing.get_context("spawn")  # a fresh allocator for each
        ours, theirs = context.Pipe()
        process = context.Process(target=contestant, args=(theirs, work, engine))
        process.start()
        theirs.close()
        ours.recv()
        return cls(process, ours, [])

    def take_turn(self, round: int) -> None:
        self.connection.send(round)
        steps, seconds, self.megabytes = self.connection.recv()
        if round:  # the first round warms up
            self.speeds.append(steps / seconds)

    def leave(self) -> None:
        self.connection.send(None)
        self.process.join()


def contest(work: str, engines: list[str], rounds: int) -> dict[str, Any]:
    """Steps per second of the bare loop, and of each engine the median ratio and the memory."""
    contestants = {}
    for engine in ["bare", *engines]:
        try:
            contestants[engine] = Contestant.enter(work, engine)
        except EOFError:  # it cannot run this model
            continue
    for round in range(rounds + 1):
        for contestant in contestants.values():
            contestant.take_turn(round)
    for contestant in contestants.values():
        contestant.leave()
    bare = contestants["bare"].speeds
    return {
        "bare steps/s": statistics.median(bare),
        "megabytes": {engine: contestant.megabytes for engine, contestant in contestants.items()},
        "ratio": {
            engine: statistics.median(
                mine / its for mine, its in zip(contestant.speeds, bare, strict=True)
            )
            for engine, contestant in contestants.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--works", nargs="+", default=list(WORKS))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    options = parser.parse_args()
    for work in options.works:
        if work not in WORKS:
            raise unknown("work", work, WORKS)
    if options.rounds < 1:
        raise FedShuffleError("give a number of rounds of at least 1.")
    results = {}
    width = max(18, *(len(engine) + 2 for engine in options.engines))
    print(f"{'work':22}{'bare steps/s':>13}" + "".join(f"{e:>{width}}" for e in options.engines))
    for work in options.works:
        found = results[work] = contest(work, options.engines, options.rounds)
        cells = (
            f"{found['ratio'][e]:9.2f}{found['megabytes'][e]:6.0f} MB"
            if e in found["ratio"]
            else "-"
            for e in options.engines
        )
        print(f"{work:22}{found['bare steps/s']:13.0f}" + "".join(f"{c:>{width}}" for c in cells))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
