"""Worker processes: each does runs of a comparison, one after another, with one torch thread.

A worker is sent the folder of a run and answers when the run is over; how it ended is in its
folder. If its parent is gone, it exits at once: the last checkpoint of the run is enough to resume.
"""

import json
import os
import pickle
import shutil
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import torch
from torch import nn

from fedshuffle._files import write_file
from fedshuffle.comparison.variants import SHORT
from fedshuffle.config import Config, load
from fedshuffle.config import runner as config_runner
from fedshuffle.config.runner import RunInputs
from fedshuffle.engines.workers import WorkerProcess
from fedshuffle.errors import DivergedError, FedShuffleError
from fedshuffle.evaluation import Evaluation, Evaluations
from fedshuffle.training.monitoring import has_diverged, monitored_loss

OUTCOME = "outcome.json"
"""Written last into the folder of a run: finished, diverged or failed, and why."""

GRACE = 30.0  # seconds that workers get to save their runs when they are stopped

Answer = str | None
"""The error that ended a run, or nothing; None if the worker died."""


# In the parent ------------------------------------------------------------------------------------


class WorkerPool:
    """A number of worker processes, each served by a thread; one that dies is replaced."""

    def __init__(self, jobs: int, log: Path) -> None:
        self._log, self._closed = log, False
        self._threads = ThreadPoolExecutor(jobs)
        self._idle: list[WorkerProcess] = []
        self._all: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for worker in self._all:
            worker.process.terminate()  # saves its run, as after Ctrl-C
        deadline = time.monotonic() + GRACE
        for worker in self._all:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            worker.process.kill()
        self._threads.shutdown()
        for worker in self._all:
            worker.end()

    def submit(self, folder: Path) -> Future[Answer]:
        """Start the run in a folder; the answer follows when it is over."""
        return self._threads.submit(self._do, folder.resolve())

    def _do(self, folder: Path) -> Answer:
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = self._start()
        worker.send(folder)
        try:
            answer: Answer = worker.receive()
        except (EOFError, OSError):  # it is dead
            return None
        self._idle.append(worker)
        return answer

    def _start(self) -> WorkerProcess:
        worker = WorkerProcess(_serve, self._log, daemon=False)  # a run may have workers itself
        self._all.append(worker)
        if self._closed:  # meanwhile
            worker.process.terminate()
        return worker


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


def write_outcome(folder: Path, outcome: str, reason: str = "") -> None:
    """Record how the run in a folder ended."""
    write_file(folder / OUTCOME, json.dumps({"outcome": outcome, "reason": reason}, indent=2))


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


def _serve(connection: Connection, log: Path) -> None:
    """Do the runs in the folders that come in, until the parent is gone."""
    with log.open("ab") as file:  # also for the output of the user's modules
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    shared: dict[str, RunInputs] = {}  # only that of the last run
    folder = pickle.loads(connection.recv_bytes())
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
            connection.send_bytes(pickle.dumps(answer))
            folder = pickle.loads(connection.recv_bytes())
