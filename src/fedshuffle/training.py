"""Training a model: the rounds of a run, evaluated, shown, recorded and saved."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import _identity, devices, engines, schedules
from fedshuffle._arrays import count, number
from fedshuffle._terminal import Console
from fedshuffle.display import Bar, Board
from fedshuffle.divergence import Watch, watched_loss
from fedshuffle.engines import Engine, Loss, Problem, Ray, RayEngine
from fedshuffle.engines.base import model_randomness
from fedshuffle.engines.machine import threads_for
from fedshuffle.errors import FedShuffleError, failing_at, user_error
from fedshuffle.evaluation import ClientTable, Evaluation, Evaluations, evaluating
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.result import Result
from fedshuffle.rounds import Run, simulate
from fedshuffle.runs import FACTS, RunFolder, terminated_as_interrupted, uninterrupted
from fedshuffle.sampling import Sampling
from fedshuffle.schedules import Schedule
from fedshuffle.state import State

__all__ = ["Evaluate", "Result", "train"]

Evaluate = Evaluation | Evaluations | Callable[[nn.Module], Mapping[str, float]]

_SAMPLED = 256
"""Over so many training examples the loss is taken where no evaluation tells it."""


def train(
    model: nn.Module,
    federation: Federation,
    *,
    loss: Loss,
    rounds: int,
    method: str | Method = "fedshuffle",
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
    step_size: Schedule | str = 0.1,
    server_step_size: Schedule | str = 1.0,
    seed: int = 0,
    engine: str | Ray = "lean",
    device: str | torch.device | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1,
    out: Path | str | None = None,
    resume: bool = False,
    checkpoint_every: int = 10,
    keep: int = 3,
    tensorboard: bool = False,
    progress: bool = False,
    how_to_resume: str | None = None,
) -> Result:
    """Train a model over a federation. The model given is left as it is.

    Every layer works in the mode in which it is given: dropout in evaluation mode drops nothing.
    That may be meant for single layers; a model that is in evaluation mode as a whole and has such
    layers gets a warning.

    Args:
        model: any module, with its starting parameters.
        federation: who owns which examples.
        loss: ``loss(model, *fields)``, the mean over a minibatch.
        rounds: how many rounds in all.
        method: a name or a :class:`~fedshuffle.methods.Method`.
        sampling: a text or a :class:`~fedshuffle.sampling.Sampling`.
        work: what a sampled client does; one epoch with batch size 1 by default.
        step_size: that of the client with the most local steps; methods scale it for the others.
            A number, a function of the round, or the name of a schedule, such as
            ``"warmup:10+cosine:0.1"`` (see :mod:`fedshuffle.schedules`).
        server_step_size: by what the aggregated update is multiplied; likewise.
        seed: everything random follows from it.
        engine: what does the training. ``"lean"`` walks one client after another, ``"lean:2"`` on
            two threads, ``"lanes"`` many small models at once; ``"auto"`` tries them on a piece of
            the work and takes the fastest; ``"loop"`` is the reference; ``"ray:4"``, or
            :class:`~fedshuffle.engines.Ray`, works on a cluster. They differ in rounding only.
        device: where to train, ``"cpu"``, ``"cuda"`` or ``"mps"``; where the model is if none.
        evaluate: an :class:`~fedshuffle.Evaluation`, or a function that is called with a copy of
            the model, in evaluation mode and without gradients, and returns numbers for the
            history. It may change the copy, such as fine-tune it.
        evaluate_every: evaluate after so many rounds, and after the last.
        out: a folder for metrics and checkpoints (see :mod:`fedshuffle.runs`).
        resume: go on with the run in ``out``; the result is that of a run never interrupted. The
            model gives the architecture and what is frozen, the checkpoint the rest.
        checkpoint_every: save after so many rounds, and after the last.
        keep: how many checkpoints to keep.
        tensorboard: write every record to ``out/tensorboard`` as well.
        progress: show a bar on the error stream.
        how_to_resume: what to tell whoever interrupts the run, to end "To go on, ..."; by default
            how to call this function again.

    >>> import torch
    >>> from fedshuffle import Federation, losses
    >>> points = torch.eye(6)
    >>> model = torch.nn.Linear(1, 6, bias=False)
    >>> federation = Federation.from_arrays(torch.ones(6, 1), points, sizes=[1, 2, 3])
    >>> result = train(model, federation, loss=losses.squared_error, rounds=100, step_size=0.1)
    >>> bool((result.model.weight.flatten() - 1 / 6).abs().max() < 0.05)
    True
    """
    rounds = count(rounds, "rounds")
    evaluate_every = count(evaluate_every, "evaluate_every")
    checkpoint_every = count(checkpoint_every, "checkpoint_every")
    keep = count(keep, "keep")
    for name, wanted in {"resume": resume, "tensorboard": tensorboard}.items():
        if wanted and out is None:
            raise FedShuffleError(f"{name}=True needs the folder of the run: give it as out.")
    engines.check(engine)
    board = Board(tensorboard)
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    folder = None if out is None else RunFolder(Path(out), keep, how_to_resume)
    begun_with = folder.settings()["rounds"] if folder and resume else rounds
    step_size = schedules.over(step_size, begun_with)
    server_step_size = schedules.over(server_step_size, begun_with)
    run = Run(federation, method, sampling, work, step_size, server_step_size, seed)
    if (place := devices.check(device)) is not None:
        model = copy.deepcopy(model).to(place)
    problem = Problem(model, loss, run.federation)
    _warn_of_evaluation_mode(model)
    if isinstance(evaluate, Evaluation | Evaluations):
        evaluate = evaluate.with_loss(loss)
        with failing_at("evaluation before training"):
            _check_names(evaluate.names)
            evaluate.check(problem.copy(problem.start))
    elif evaluate is not None and not callable(evaluate):
        raise FedShuffleError(
            f"evaluate is {evaluate!r:.60}, but must be a function or Evaluation."
        )

    with ExitStack() as opened:
        if folder:
            folder.check(resume)
            opened.enter_context(terminated_as_interrupted())
            opened.enter_context(folder.writing())
            if resume:
                engine = engines.again(engine, str(folder.settings().get("engine", "lean")))
        name, runner, why = _engine(engine, problem, run)
        if isinstance(runner, RayEngine):
            opened.enter_context(closing(runner))
        if progress and why:
            console.print(f"engine {name} ({why})")
        shelf = None if folder is None else folder.shelf(len(problem.start), problem.dtype)
        state = run.start(problem.start, shelf)
        history: list[dict[str, Any]] = []
        clients: ClientTable | None = None
        if folder:
            settings = {
                **run.settings(begun_with),
                "engine": name,  # bit for bit only with the same
                "loss": _identity.function(loss),
                "parameters": len(problem.start),
                "dtype": str(problem.dtype),
                "model_sha256": _identity.architecture(model),
                "frozen_sha256": _identity.frozen(model),
                "rounds": rounds,
            }
            state = _on(problem, folder.begin(settings, state, resume))

        try:
            known = not resume  # whether the model given is the one at the start
            if folder:
                known = _identity.tensor(problem.start) == folder.settings()["start_sha256"]
                history = folder.metrics()
                board.open(folder.path / "tensorboard", history)
            watch = Watch(_loss_at_start(evaluate, problem) if known else None)
            for record in history:
                watch.add(record)
            bar = Bar(progress, rounds, history)
            with board, bar:
                begun = time.perf_counter()
                for (after,) in simulate(runner, [run], max(0, rounds - state.round), [state]):
                    last = after.round == rounds
                    record = _costs(run, after) | {"seconds": time.perf_counter() - begun}
                    if evaluate is not None and (last or after.round % evaluate_every == 0):
                        found, clients = _evaluated(evaluate, problem.copy(after.x), after.round)
                        record |= found
                    history.append(record)
                    if folder:
                        folder.record(record)
                        if last or after.round % checkpoint_every == 0:
                            folder.save(after)
                    board.add(record)
                    bar.add(record)
                    watch.add(record)
                    watch.warn()
                    state = after
                    begun = time.perf_counter()
                if watch.blind and known:  # nobody asked for a loss, which yet tells
                    watch = Watch(("loss", _sampled_loss(problem, problem.start)))
                    watch.add({"round": state.round, "loss": _sampled_loss(problem, state.x)})
                    watch.warn()
        except (KeyboardInterrupt, SystemExit, Exception) as error:
            if folder:  # the round that did not end well is abandoned; the state before it is whole
                with uninterrupted():  # also by a second Ctrl-C
                    folder.save(state)
                    console.print(
                        f"Stopped after round {state.round}, which is saved. To go on,"
                        f" {folder.how_to_resume}."
                    )
            if isinstance(error, SystemExit):  # of a rule of the user's
                raise FedShuffleError(f"round {state.round}: {user_error(error)}.") from error
            raise
    if folder and clients is not None:
        clients.to_csv(folder.path / "clients.csv")
    home = folder.path if folder else None
    return Result(problem.copy(state.x), history, home, name, clients, watch.diverged)


def _loss_at_start(evaluate: Evaluate | None, problem: Problem) -> tuple[str, float] | None:
    """The loss before training and its name; a function of the user's is not called for it."""
    if not isinstance(evaluate, Evaluation | Evaluations):
        return None
    name = watched_loss(evaluate.names)
    if name is None:
        return None
    with failing_at("evaluation before training"):
        return name, evaluate(problem.copy(problem.start))[name]


def _sampled_loss(problem: Problem, x: Tensor) -> float:
    """The loss of a model over training examples from all over the federation."""
    rows = np.unique(np.linspace(0, problem.federation.offsets[-1] - 1, _SAMPLED).astype(np.int64))
    one_thread = threads_for(problem, len(rows))
    with failing_at("loss after training"), one_thread, model_randomness(problem, seed=0):
        return float(problem.loss(problem.copy(x), *problem.batch(rows)).detach())


def _on(problem: Problem, state: State) -> State:
    """The state where the model is: a checkpoint does not say on which device it was made."""
    if (state.x.shape, state.x.dtype) != (problem.start.shape, problem.dtype):
        raise FedShuffleError(
            f"the checkpoint holds {len(state.x)} parameters of {state.x.dtype}, but the model has"
            f" {len(problem.start)} of {problem.dtype}. Use the model that the run began with."
        )
    memory = {name: tensor.to(problem.device) for name, tensor in state.memory.items()}
    return replace(state, x=state.x.to(problem.device), memory=memory)


def _warn_of_evaluation_mode(model: nn.Module) -> None:
    """Training without dropout is rarely meant where the whole model is in evaluation mode."""
    if model.training:
        return
    for name, module in model.named_modules():
        share = getattr(module, "dropout", None)  # of attention and recurrent layers
        drops = isinstance(share, float) and share > 0
        drops |= "drop" in type(module).__name__.lower() and getattr(module, "p", 1) > 0
        if drops and not module.training:
            warnings.warn(
                f"the model is in evaluation mode, so its layer {name!r} drops nothing in training."
                " Call model.train() first; layers that shall stay as they are, put into"
                " evaluation mode one by one after it.",
                stacklevel=3,
            )
            return


def _engine(name: str | Ray, problem: Problem, run: Run) -> tuple[str, Engine, str]:
    """The engine of that name; if it is to be chosen, the one chosen, and why."""
    if name != "auto":
        made = engines.make(name, problem)
        return made.name if isinstance(made, RayEngine) else str(name), made, ""
    for round in range(100):
        state = replace(run.start(problem.start), round=round)
        if (walk := run.walk(state)) is not None:
            return engines.choose(problem, walk)
    return "lean", engines.make("lean", problem), "no client takes part in the first rounds"


def _costs(run: Run, state: State) -> dict[str, Any]:
    """What the round that led to this state asked of clients and network."""
    cohort = run.cohort(state.round - 1)
    asked, number = len(cohort.clients), state.x.element_size()
    sent = asked if state.sent is None else state.sent
    norms = 0 if state.sent is None else asked * number  # all say how long their update is
    size = 0 if run.method.pooled else len(state.x) * number  # pooled data travels nowhere
    direction = run.method.direction
    return {
        "round": state.round,
        "clients": asked,
        "steps": int(cohort.done.sum()),
        "bytes_down": round(direction.down * size * asked),
        "bytes_up": round(((direction.up - 1) * asked + sent) * size) + norms,
        "cohort": cohort.clients.tolist(),
    }


def _evaluated(
    evaluate: Evaluate, model: nn.Module, round: int
) -> tuple[dict[str, float], ClientTable | None]:
    """What was evaluated, where all that is not finite is NaN, and how long it took; and the table
    of clients, if there is one.
    """
    begun, clients = time.perf_counter(), None
    with failing_at(f"evaluation after round {round}"), evaluating(model):
        if isinstance(evaluate, Evaluation | Evaluations):
            measured: Mapping[str, float]
            measured, clients = evaluate.both(model)
        else:
            measured = evaluate(model)
        found = {k: number(value, f"metric {k!r}") for k, value in measured.items()}
        _check_names(found)
    record = {k: value if math.isfinite(value) else math.nan for k, value in found.items()}
    return record | {"evaluation_seconds": time.perf_counter() - begun}, clients


def _check_names(names: Iterable[str]) -> None:
    taken = set(names) & set(FACTS)
    if taken:
        raise FedShuffleError(f"evaluate may not return {min(taken)!r}: rename that metric.")
