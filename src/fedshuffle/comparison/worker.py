"""A process that does runs of a comparison, one after another.

Folders come in, one a line, and an answer goes out for each: how the run ended is in its folder.
Where the other side is gone, there is nobody to work for, and the process ends at once; what a run
has saved by then is enough to go on.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fedshuffle.comparison.plan import end
from fedshuffle.comparison.settings import SHORT
from fedshuffle.config import Config, load, running
from fedshuffle.config.running import Task
from fedshuffle.divergence import has_diverged, watched_loss
from fedshuffle.errors import DivergedError, FedShuffleError
from fedshuffle.evaluation import Evaluation, Evaluations


class HopelessError(FedShuffleError):
    """A run whose loss is no longer worth the time."""


def watched(config: Config, task: Task) -> Task:
    """The task of a run that ends early when its loss tells that it is lost."""
    evaluate = task.evaluate
    assert isinstance(evaluate, Evaluation | Evaluations)
    name = watched_loss(evaluate.names)
    if name is None:
        return task
    start = evaluate(running.model(config))[name]
    return replace(task, evaluate=_watch(evaluate, name, start))


def _watch(
    evaluate: Callable[[nn.Module], Mapping[str, float]], name: str, start: float
) -> Callable[[nn.Module], Mapping[str, float]]:
    def watch(model: nn.Module) -> Mapping[str, float]:
        found = evaluate(model)
        if has_diverged(found[name], start):
            raise HopelessError(f"the {name} is {found[name]:.4g}, at the start {start:.4g}.")
        return found

    return watch


def work(folder: Path, task: Callable[[Config], Task]) -> None:
    """Do the run in a folder, or what is left of it, and say there how it ended."""
    config = load(folder / "config.toml")
    short = folder.name.startswith(SHORT)
    shared = task(config)
    try:
        result = running.resume(folder, task=watched(config, shared))
    except FedShuffleError as error:
        lost = isinstance(error, DivergedError) or isinstance(error.__cause__, HopelessError)
        if not lost:
            raise
        end(folder, "diverged", str(error))
    else:
        if not short:
            _save_clients(shared, result.model, folder)
        end(folder, "finished")  # before the rest: without checkpoints, nothing could go on
        if short:  # it will not go on, and many models take room
            (folder / "model.safetensors").unlink()
            shutil.rmtree(folder / "checkpoints")


def _save_clients(task: Task, model: nn.Module, folder: Path) -> None:
    """Leave the table of clients in the run's folder, if they are measured."""
    evaluate = task.evaluate
    assert isinstance(evaluate, Evaluation | Evaluations)
    if evaluate.over_clients:
        _, clients = evaluate.both(model)
        assert clients is not None
        clients.to_csv(folder / "clients.csv")


class _LastTask:
    """The data of the run before, if they are also those of this one."""

    def __init__(self) -> None:
        self._key = ""
        self._task: Task | None = None

    def __call__(self, config: Config) -> Task:
        key = repr((config.data, config.loss, config.evaluation))
        if self._task is None or key != self._key:
            self._task = None  # what is no longer needed makes room first
            self._key, self._task = key, config.task()
        assert self._task is not None
        return self._task


def main() -> None:
    """Take folders from the input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the process will stop it
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a user's module prints is no answer
    torch.set_num_threads(1)
    folders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            folders.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    task = _LastTask()
    folder = Path(folders.get())
    with load(folder / "config.toml").importable():  # the user's modules are imported once
        while True:
            answer = {}
            try:
                work(folder, task)
            except FedShuffleError as error:
                answer["error"] = str(error)
            except Exception as error:
                traceback.print_exc()
                answer["error"] = f"{type(error).__name__}: {error}."
            except KeyboardInterrupt:  # told to stop: the run is saved
                os._exit(130)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            folder = Path(folders.get())


if __name__ == "__main__":
    main()
