"""What one thread of torch gains over its default number for small steps, on this machine as it is.

    python benchmarks/threads.py

The same engine takes turns with one thread, as it does by itself, and with torch's default. Printed
are the medians of the local steps per second, and of their ratios.
"""

import itertools
import os
import statistics
import time

import torch
from torch import nn

from fedshuffle import Federation, LocalWork, losses
from fedshuffle.engines import Problem, SequentialEngine
from fedshuffle.engines import cpu_tuning as machine
from fedshuffle.state import State
from fedshuffle.training.rounds import Run

TURNS = 8
SMALL = machine._SMALL
WORKS = {
    "logistic regression 64-10, batch 8": ([64, 10], 8),
    "logistic regression 784-62, batch 32": ([784, 62], 32),
    "perceptron 784-200-62, batch 32": ([784, 200, 62], 32),
}


def main() -> None:
    threads = torch.get_num_threads()
    if hasattr(os, "getloadavg"):
        print(f"load {os.getloadavg()[0]:.1f} on {machine.available_cores()} cores")
    for name, (widths, batch) in WORKS.items():
        torch.manual_seed(0)
        layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(widths)]
        model = nn.Sequential(*[layer for pair in layers for layer in pair][:-1])
        x, y = torch.randn(400, widths[0]), torch.randint(widths[-1], (400,))
        federation = Federation.from_arrays(x, y, sizes=[100] * 4)
        problem = Problem(model, losses.cross_entropy, federation)
        engine = SequentialEngine(problem)
        request = Run(federation, "fedshuffle", "full", LocalWork(batch_size=batch)).local_training(
            State(problem.start)
        )
        assert request is not None
        steps = sum(task.minibatches.steps for task in request.tasks)
        speeds: dict[float, list[float]] = {SMALL: [], 0.0: []}
        for turn in range(TURNS + 1):
            for small, found in speeds.items():
                machine._SMALL = small
                begun = time.perf_counter()
                engine.local_training([request])
                if turn:  # the first is to warm up
                    found.append(steps / (time.perf_counter() - begun))
        one, many = speeds.values()
        ratios = sorted(a / b for a, b in zip(one, many, strict=True))
        print(
            f"{name}: one thread {statistics.median(one):,.0f} steps/s, {threads} threads"
            f" {statistics.median(many):,.0f}; ratio {statistics.median(ratios):.1f}"
            f" ({ratios[0]:.1f} to {ratios[-1]:.1f})"
        )


if __name__ == "__main__":
    main()
