"""Settings of the process while engines compute."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle.engines import Problem, make
from fedshuffle.engines.cpu_tuning import flushed_denormals, keep_freed_memory, operations
from fedshuffle.kernel import ClientTask, LocalTraining, StepCoefficients
from fedshuffle.local_work import Minibatches
from tests.engines.models import data


@pytest.mark.slow
@pytest.mark.skipif(not keep_freed_memory(), reason="no allocator here that could be told")
@pytest.mark.parametrize(("setting", "kept"), [("1", True), ("0", False)])
def test_keeping_freed_memory_can_be_switched_off(setting: str, kept: bool) -> None:
    """How much of 80 MB a new process still has after it freed them."""
    program = """
import torch
from pathlib import Path
from fedshuffle.engines.cpu_tuning import keep_freed_memory
def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])
keep_freed_memory()
before = pages()
torch.empty(20_000_000).fill_(1.0)
print((pages() - before) * 4096)
"""
    environment = os.environ | {"FEDSHUFFLE_KEEP_MEMORY": setting}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) > 70e6) == kept


def test_denormal_numbers_are_flushed_only_while_training() -> None:
    tiny = torch.tensor(1e-39)
    with flushed_denormals():
        assert float(tiny * 0.5) == 0
        with flushed_denormals():
            pass
        assert float(tiny * 0.5) == 0
    assert float(tiny * 0.5) > 0


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized"])
@pytest.mark.parametrize(("small", "threads"), [(1e9, 1), (2 * 2 * 21, 3)])
def test_small_steps_are_computed_on_one_thread(
    engine: str, small: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of fewer operations than is said; torch's own setting comes back."""
    monkeypatch.setattr("fedshuffle.engines.cpu_tuning._SMALL", small)
    seen = []

    def watched(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return nn.functional.cross_entropy(model(x), y)

    problem = Problem(nn.Linear(6, 3), watched, data((6,), 3, [2, 3]))
    runner = make(engine, problem)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen.clear()
        stream = Minibatches(0, 2, 1, 2, "sequential", seed=1, round=0)
        runner.local_training(
            [LocalTraining(problem.start, [ClientTask(stream, 0.1, StepCoefficients(), [1.0])], 1)]
        )
        assert set(seen) == {threads}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("model", "shape", "found"),
    [
        (nn.Linear(6, 3), (6,), 2 * 5 * 21),
        (nn.Conv2d(2, 3, 3), (2, 8, 8), 2 * 5 * 57 * 128),  # at most, for it has 6 x 6 places
        (nn.Sequential(nn.Linear(6, 3)), (4, 6), 2 * 5 * 21 * 24),
    ],
)
def test_operations_are_counted_from_above(
    model: nn.Module, shape: tuple[int, ...], found: float
) -> None:
    federation = data(shape, 3, [2, 3])
    assert operations(Problem(model, losses.squared_error, federation), 5) == found
