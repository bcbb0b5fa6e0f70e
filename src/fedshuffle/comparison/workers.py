"""Worker processes: each does runs of a comparison, one after another, with one torch thread.

A worker reads the folder of a run per line and answers each with a line of JSON; how the run ended
is in its folder. When its input ends, its parent is gone, and it exits at once: the last checkpoint
of the run is enough to resume.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import nn

from fedshuffle.comparison.spec import SHORT
from fedshuffle.comparison.study import write_outcome
from fedshuffle.config import Config, load
from fedshuffle.config import runner as config_runner
from fedshuffle.config.runner import RunInputs
from fedshuffle.errors import DivergedError, FedShuffleError
from fedshuffle.evaluation import Evaluation, Evaluations
from fedshuffle.training.divergence import has_diverged, monitored_loss

GRACE = 30.0
"""Seconds that workers get to save their runs when they are stopped."""

Answer = str | None
"""The error that ended a run, or nothing; None if the worker died."""


# In the parent ------------------------------------------------------------------------------------


class WorkerPool:
    """A number of worker processes, each served by a thread; one that dies is replaced."""

    def __init__(self, jobs: int, log: Path) -> None:
        self._log, self._closed = log, False
        self._threads = ThreadPoolExecutor(jobs)
        self._idle: list[subprocess.Popen[str]] = []
        self._all: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for process in self._all:
            process.terminate()  # saves its run, as after Ctrl-C
        deadline = time.monotonic() + GRACE
        for process in self._all:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        self._threads.shutdown()
        for process in self._all:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()

    def submit(self, folder: Path) -> Future[Answer]:
        """Start the run in a folder; the answer follows when it is over."""
        return self._threads.submit(self._do, str(folder.resolve()))

    def _do(self, folder: str) -> Answer:
        try:
            process = self._idle.pop()
        except IndexError:
            process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = ""
        with contextlib.suppress(OSError):  # it is dead
            process.stdin.write(json.dumps(folder) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if not answer:
            return None
        self._idle.append(process)
        found: Answer = json.loads(answer)
        return found

    def _start(self) -> subprocess.Popen[str]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                text=True,
            )
        self._all.append(process)
        if self._closed:  # meanwhile
            process.terminate()
        return process


# In the worker ------------------------------------------------------------------------------------


class _LossDivergedError(FedShuffleError):
    """The evaluated loss shows that the run has diverged."""


def _watched(config: Config, inputs: RunInputs) -> RunInputs:
    """Inputs with an evaluation that ends the run when its loss has diverged."""
    evaluate = inputs.evaluate
    assert isinstance(evaluate, Evaluation | Evaluations)
    name = monitored_loss(evaluate.names)
    if name is None:
        return inputs
    start = evaluate(config_runner.initial_model(config))[name]

    def watch(model: nn.Module) -> Mapping[str, float]:
        found = evaluate(model)
        if has_diverged(found[name], start):
            raise _LossDivergedError(f"the {name} is {found[name]:.4g}, at the start {start:.4g}.")
        return found

    return replace(inputs, evaluate=watch)


def _do(folder: Path, inputs: RunInputs, config: Config) -> None:
    """Do the run in a folder, or the rest of it, and record how it ended."""
    try:
        result = config_runner.resume(folder, inputs=_watched(config, inputs))
    except FedShuffleError as error:
        lost = isinstance(error, DivergedError) or isinstance(error.__cause__, _LossDivergedError)
        if not lost:
            raise
        write_outcome(folder, "diverged", str(error))
        return
    short = folder.name.startswith(SHORT)
    assert isinstance(inputs.evaluate, Evaluation | Evaluations)
    if inputs.evaluate.per_client and not short:
        _, clients = inputs.evaluate.evaluate(result.model)
        assert clients is not None
        clients.to_csv(folder / "clients.csv")
    write_outcome(folder, "finished")
    if short:  # only now: without its checkpoints it cannot be resumed
        (folder / "model.safetensors").unlink()  # the models of many short runs take space
        shutil.rmtree(folder / "checkpoints")


def main() -> None:
    """Do the runs in the folders that come in, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of the user's modules goes to the log
    torch.set_num_threads(1)
    folders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            folders.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    shared: dict[str, RunInputs] = {}  # only that of the last run
    folder = Path(folders.get())
    with load(folder / "config.toml").importable():  # the user's modules are imported once
        while True:
            answer = ""
            try:
                config = load(folder / "config.toml")
                key = repr((config.data, config.loss, config.evaluation))
                if key not in shared:
                    shared.clear()  # free its memory first
                    shared[key] = config.inputs()
                _do(folder, shared[key], config)
            except FedShuffleError as error:
                answer = str(error)
            except Exception as error:
                traceback.print_exc()
                answer = f"{type(error).__name__}: {error}."
            except KeyboardInterrupt:  # stopped by the parent: the run is saved
                os._exit(130)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            folder = Path(folders.get())


if __name__ == "__main__":
    main()
