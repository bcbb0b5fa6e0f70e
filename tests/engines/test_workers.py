"""Workers as threads and as processes: failures, and what becomes of the processes."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedshuffle import Federation, FedShuffleError, LocalWork, TrainingError, losses, train
from fedshuffle.engines import Problem, ReferenceEngine, make
from fedshuffle.engines.serialization import dump_problem
from fedshuffle.training.rounds import Run, simulate
from fedshuffle.training.run_folder import RunFolder
from tests.engines.models import data
from tests.problems import Point, copies, half_squared_distance, targets
from tests.processes import alive, wait_for


def test_threads_refuse_dropout() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double()
    with pytest.raises(FedShuffleError, match="Use one worker"):
        train(
            model, data((6,), 3, [4, 6]), loss=losses.cross_entropy, rounds=1, engine="sequential:2"
        )


def fatal(model: Point, rows: Tensor) -> Tensor:
    """Kills its process at the client with five examples."""
    if len(rows) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return half_squared_distance(model, rows)


@pytest.mark.slow
def test_a_worker_that_dies_is_named_and_the_engine_recovers(tmp_path: Path) -> None:
    federation = Federation.from_arrays(targets(10, 2), client_ids=list("aabbbbbccc"))
    problem = Problem(Point(2), fatal, federation)
    engine = make("sequential:2:processes", problem)
    run = Run(federation, "fedavg-rr", "full", LocalWork(batch_size=5))
    with pytest.raises(TrainingError, match=r"client b, local.*signal 9 \(out of memory") as error:
        list(simulate(engine, [run], 1))
    assert (error.value.client, error.value.round) == ("b", 0)
    small = Run(federation, "fedavg-rr", "full", LocalWork(batch_size=3))  # never five at once
    *_, (have,) = simulate(engine, [small], 2)
    *_, (want,) = simulate(ReferenceEngine(problem), [small], 2)
    torch.testing.assert_close(have.x, want.x)

    out = tmp_path / "run"

    with pytest.raises(TrainingError, match=r"round 2, client b, local training.*signal 9"):
        train(
            Point(2),
            federation,
            loss=fatal,
            rounds=5,
            sampling="independent:1,0.3,1",  # with this seed, client b first comes in round 2
            work=LocalWork(batch_size=5),
            engine="sequential:2:processes",
            out=out,
            seed=1,
        )
    latest = RunFolder(out).latest()
    assert latest is not None
    assert latest.round == 2


def test_worker_processes_say_what_went_wrong() -> None:
    def broken(model: Point, rows: Tensor) -> Tensor:
        if len(rows) == 5:
            raise KeyError("oops")
        return half_squared_distance(model, rows)

    federation = Federation.from_arrays(targets(10, 2), client_ids=list("aabbbbbccc"))
    with pytest.raises(TrainingError, match="client b, local training: KeyError: 'oops'"):
        train(
            Point(2),
            federation,
            loss=broken,
            rounds=1,
            work=LocalWork(batch_size=5),
            engine="sequential:2:processes",
        )


@pytest.mark.parametrize("engine", ["sequential:2", "vectorized:2", "sequential:2:processes"])
def test_an_engine_can_be_used_again_after_a_failure(engine: str, tmp_path: Path) -> None:
    """The other workers are in the middle of their clients when one fails."""
    marker = tmp_path / "failed"

    def once(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if len(x) == 5 and not marker.exists():
            marker.touch()
            raise KeyError("oops")
        return losses.cross_entropy(model, x, y)

    federation = data((6,), 3, [5, 300, 9, 200])
    problem = Problem(nn.Linear(6, 3).double(), once, federation)
    runner = make(engine, problem)
    run = Run(federation, "fedshuffle", "full", LocalWork(epochs=3, batch_size=10), 0.05)
    with pytest.raises(FedShuffleError, match="oops"):
        list(simulate(runner, [run], 1))
    *_, (have,) = simulate(runner, [run], 2)
    *_, (want,) = simulate(ReferenceEngine(problem), [run], 2)
    torch.testing.assert_close(have.x, want.x, rtol=1e-11, atol=1e-12)


def program(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script that may import the tests."""
    root, script = str(Path(__file__).parents[2]), folder / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {root!r})\n{text}")
    return subprocess.run([sys.executable, script, *words], capture_output=True, text=True)


def test_what_workers_compare_takes_no_more_memory_than_a_small_minibatch() -> None:
    """Every worker does so when it starts, and activations of a large model fill the memory."""
    seen: list[int] = []

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(len(x))
        return losses.cross_entropy(model, x, y)

    federation = data((6,), 3, [5] * 20)
    dump_problem(Problem(nn.Linear(6, 3).double(), loss, federation))
    assert 0 < max(seen) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_worker_processes_do_not_outlive_a_killed_parent(busy: bool, tmp_path: Path) -> None:
    """Not even those that compute for ever, and the process that they are forked from."""
    killed = """
import multiprocessing.forkserver, os, signal, threading, time
from pathlib import Path
from fedshuffle.engines import Problem, make
from fedshuffle.training.rounds import Run, simulate
from tests.problems import Point, copies, half_squared_distance, targets

here, busy, started = os.getpid(), sys.argv[1] == "True", Path(sys.argv[2])

def endless(model, rows):
    while busy and os.getpid() != here:
        started.touch()
    return half_squared_distance(model, rows)

def end():
    while busy and not started.exists():
        time.sleep(0.01)
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    print(*(worker.process.pid for worker in engine._running), server, flush=True)
    os.kill(here, signal.SIGKILL)

problem = Problem(Point(2), endless, copies([1, 2], targets(2, 2)))
engine = make("sequential:2:processes", problem)
if busy:
    threading.Thread(target=end).start()
list(simulate(engine, [Run(problem.federation, "fedavg-rr")], 1))
end()
"""
    done = program(tmp_path, killed, str(busy), str(tmp_path / "started"))
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    wait_for(lambda: not any(map(alive, pids)), "the workers and their server to end")


@pytest.mark.slow
def test_worker_processes_serve_a_program_whose_threads_have_computed(tmp_path: Path) -> None:
    """Its model and its loss are of no module, and nothing guards it against being imported."""
    text = """
import torch
from torch import nn
from fedshuffle import Federation, LocalWork, train

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 96), nn.Linear(96, 3)
    def forward(self, x):
        return self.out(self.hidden(x).tanh()) * factor

factor = 0.5
torch.manual_seed(0)
model = Scaled()
federation = Federation.from_arrays(
    torch.randn(200, 64), torch.randint(3, (200,)), sizes=[90, 30, 60, 20]
)
criterion = nn.CrossEntropyLoss()
settings = dict(
    loss=lambda model, x, y: criterion(model(x), y), rounds=1, work=LocalWork(batch_size=32)
)
torch.set_num_threads(4)
for _ in range(20):
    torch.randn(300, 300) @ torch.randn(300, 300)
    models = [
        train(model, federation, engine=engine, **settings).model
        for engine in ("sequential:2", "sequential:2:processes")
    ]
    for one, other in zip(*(m.parameters() for m in models)):
        assert torch.equal(one, other)
print("done")
"""
    found = program(tmp_path, text)
    assert found.stdout == "done\n", found.stderr


LOCK = threading.Lock()
"""Stands for the locks inside of libraries, which a thread may hold at any time."""


def locked(model: Point, rows: Tensor) -> Tensor:
    """Needs the lock, as a matrix product may need one of its library's."""
    assert LOCK.acquire(timeout=20), "the lock is held by a thread that is not here"
    LOCK.release()
    return half_squared_distance(model, rows)


def test_worker_processes_inherit_no_locks_of_threads() -> None:
    """A fork of a program with threads would wait for ever for a lock that one of them holds."""
    problem = Problem(Point(2), locked, copies([1, 2], targets(2, 2)))
    engine = make("sequential:2:processes", problem)
    run = Run(problem.federation, "fedavg-rr")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(LOCK.acquire).result()
        try:
            (have,) = next(simulate(engine, [run], 1))
        finally:
            LOCK.release()
    (want,) = next(simulate(ReferenceEngine(problem), [run], 1))
    torch.testing.assert_close(have.x, want.x)
    if sys.platform == "linux":
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        threads = Path(f"/proc/{server}/task")
        assert len(list(threads.iterdir())) == 1
