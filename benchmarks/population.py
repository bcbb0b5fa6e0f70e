"""Cost of a large population: importing and opening it, and a round with a cohort from it.

For 10,000, 100,000 and 1,000,000 clients, a store is written client by client. A new process opens
it, draws and plans cohorts of 1000, and trains logistic regression on them. The cost of a round
should not depend on the population, also where clients come and go by a Markov chain; only
importance sampling looks at every client. Times of rounds are medians; memory is the peak of the
process, torch included.

    python benchmarks/population.py [clients ...]
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedshuffle import Federation, LocalWork
from fedshuffle.data import import_chunks

INPUTS, CLASSES, COHORT, ROUNDS = 8, 4, 1000, 20
MARKOV = "markov:on=0.05,off=0.1"  # clients are there a third of the time


def chunks(clients: int) -> Iterator[tuple[int, Any, Any]]:
    """Random examples over clients of log-normal sizes, 5 on average."""
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(np.log(5) - 0.4, 0.9, clients).astype(int), 1, 200)
    for client, size in enumerate(sizes.tolist()):
        yield (
            client,
            rng.standard_normal((size, INPUTS), dtype=np.float32),
            rng.integers(CLASSES, size=size),
        )


def build(folder: Path, clients: int) -> dict[str, float]:
    """Import a population and measure the speed."""
    begun = time.perf_counter()
    federation = import_chunks(chunks(clients), folder)
    seconds = time.perf_counter() - begun
    rows = int(federation.offsets[-1])
    return {"clients": clients, "import clients/s": clients / seconds, "rows/s": rows / seconds}


def measure(folder: Path) -> dict[str, float]:
    """Open a population and train on it in this process."""
    import torch

    from fedshuffle import losses
    from fedshuffle.engines import Problem, make
    from fedshuffle.state import State
    from fedshuffle.training.rounds import Run, run_round

    torch.set_num_threads(1)
    begun = time.perf_counter()
    federation = Federation.open(folder)
    found = {"open s": time.perf_counter() - begun}
    problem = Problem(torch.nn.Linear(INPUTS, CLASSES), losses.cross_entropy, federation)
    work = LocalWork(epochs=1, batch_size=8)
    engine = make("vectorized", problem)

    def train_round(run: Run, round: int) -> None:
        run_round(engine, [run], [State(problem.start, round=round)])

    for name, there in {"uniform": None, "importance": None, "uniform, markov": MARKOV}.items():
        begun = time.perf_counter()
        sampling = f"{name.partition(',')[0]}:{COHORT}"
        run = Run(federation, "fedshuffle", sampling, work, availability=there)
        run.cohort(0)
        found[f"{name} set up ms"] = 1000 * (time.perf_counter() - begun)
        found[f"{name} plan ms"] = _median(run.cohort)
        found[f"{name} round ms"] = _median(partial(train_round, run))
    found["memory MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return found


def _median(run: Callable[[int], object]) -> float:
    """Median time per round in milliseconds."""
    times = []
    for round in range(ROUNDS + 1):
        begun = time.perf_counter()
        run(round)
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times[1:])  # the first one warms up


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Path(sys.argv[2]))))
        return
    columns: list[dict[str, float]] = []
    for clients in map(int, sys.argv[1:] or ["10000", "100000", "1000000"]):
        with tempfile.TemporaryDirectory() as place:
            found = build(Path(place) / "people", clients)
            words = [sys.executable, __file__, "--measure", str(Path(place) / "people")]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            columns.append(found | json.loads(done.stdout))
    for name in columns[0]:
        print(f"{name:24}" + "".join(f"{column[name]:>14,.4g}" for column in columns))


if __name__ == "__main__":
    main()
