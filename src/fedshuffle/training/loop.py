"""Training a model: the rounds of a run, evaluated, shown, recorded and saved; its result."""

import copy
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import devices, engines, fingerprint, schedules
from fedshuffle._arrays import count, number
from fedshuffle._terminal import html_table, interrupted_once
from fedshuffle.engines import Engine, Loss, Problem, Ray
from fedshuffle.engines.base import model_randomness
from fedshuffle.engines.cpu_tuning import threads_for
from fedshuffle.errors import FedShuffleError, error_context, optional_import, unknown, user_error
from fedshuffle.evaluation import ClientTable, Evaluation, Evaluations, evaluation_mode
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.sampling import Sampling
from fedshuffle.schedules import Schedule
from fedshuffle.state import State
from fedshuffle.training import monitoring
from fedshuffle.training.rounds import Run, simulate
from fedshuffle.training.run_folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Evaluate = Evaluation | Evaluations | Callable[[nn.Module], Mapping[str, float]]
_OURS = (Evaluation, Evaluations)


@dataclass(frozen=True, repr=False)
class Result:
    """The result of :func:`fedshuffle.train`: the model, and one record per round.

    >>> Result(nn.Identity(), [{"round": 1, "loss": 2.0}, {"round": 2, "loss": 0.5}])
    Result(2 rounds, engine sequential, loss 0.5)
    """

    model: nn.Module
    history: list[dict[str, Any]]
    out: Path | None = None
    """The folder of the run, if it has one."""
    engine: str = "sequential"
    """The engine that did the training."""
    clients: ClientTable | None = field(default=None, compare=False)
    """Every client after the last round, if an :class:`~fedshuffle.Evaluation` measured them."""
    diverged: str | None = None
    """Why the run counts as diverged, with its loss; None otherwise."""

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics."""
        return list(
            dict.fromkeys(name for record in self.history for name in monitoring.metrics_of(record))
        )

    def frame(self) -> "pd.DataFrame":
        """The history as a pandas data frame, one row per round; NaN where not evaluated."""
        pandas = optional_import("pandas", "a data frame", "frame", "or read the history, a list")
        frame: pd.DataFrame = pandas.DataFrame(self.history).set_index("round")
        return frame

    def plot(self, metric: str | None = None, axes: "Axes | None" = None) -> "Axes":
        """Draw a metric (by default the first) over the rounds, with its mean and worst decile over
        clients if they were recorded; by default in a new figure.
        """
        known = self.metrics
        if not known:
            raise FedShuffleError("nothing was evaluated in this run: give train an Evaluation.")
        metric = known[0] if metric is None else metric
        if metric not in known:
            raise unknown("metric", metric, known)
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.subplots(layout="constrained")[1]
        labels = {"": "all examples", "_mean": "mean over clients"}
        for suffix, label in (labels | {"_worst_decile": "worst tenth of the clients"}).items():
            name = metric + suffix
            if points := [(r["round"], r[name]) for r in self.history if name in r]:
                axes.plot(*zip(*points, strict=True), "--" if suffix else "-", label=label)
        axes.set(xlabel="round", ylabel=metric)
        axes.legend()
        return axes

    def __repr__(self) -> str:
        words = [f"{len(self.history)} rounds", f"engine {self.engine}"]
        words += [f"diverged: {self.diverged}"] if self.diverged else []
        over_clients = ("_mean", "_worst_decile", "_undefined")
        over_all = [end for end in self._ends() if not end[0].endswith(over_clients)]
        words += [f"{name} {last:.4g}" for name, _, last in over_all[:6]]
        words += [f"out {str(self.out)!r}"] if self.out is not None else []
        return f"Result({', '.join(words)})"

    def _repr_html_(self) -> str:
        rows = [[name, f"{first:.4g}", f"{last:.4g}"] for name, first, last in self._ends()]
        head = f"{len(self.history)} rounds, engine {self.engine}"
        head += f", in {self.out}" if self.out is not None else ""
        head += f". Diverged: {self.diverged}" if self.diverged else ""
        table = html_table(["metric", "first evaluated", "last evaluated"], rows) if rows else ""
        return f"<p>{escape(head)}</p>{table}"

    def _ends(self) -> list[tuple[str, float, float]]:
        values = {m: [record[m] for record in self.history if m in record] for m in self.metrics}
        return [(metric, found[0], found[-1]) for metric, found in values.items()]


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
    engine: str | Ray = "sequential",
    device: str | torch.device | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 1,
    out: str | os.PathLike[str] | RunFolder | None = None,
    resume: bool = False,
    checkpoint_every: int = 10,
    keep: int = 3,
    record_cohorts: bool = False,
    tensorboard: bool = False,
    progress: bool = False,
) -> Result:
    """Train a model over a federation. The given model is not changed.

    Every layer trains in the mode in which it is given: dropout in evaluation mode drops nothing.
    A model with such layers that is in evaluation mode as a whole gets a warning.

    Args:
        model: any module, with its initial parameters.
        federation: the clients and their examples.
        loss: ``loss(model, *fields)``, the mean over a minibatch.
        rounds: the total number of rounds.
        method: a name or a :class:`~fedshuffle.methods.Method`.
        sampling: a text or a :class:`~fedshuffle.sampling.Sampling`.
        work: the local work of a sampled client; by default one epoch with batch size 1.
        step_size: that of the client with the most local steps; methods scale it for the others.
            A number, a function of the round, or the name of a schedule, such as
            ``"warmup:10+cosine:0.1"`` (see :mod:`fedshuffle.schedules`).
        server_step_size: the factor of the aggregated update, in the same form.
        seed: determines everything random.
        engine: ``"sequential"`` trains one client after another, ``"sequential:2"`` on two
            threads, ``"vectorized"`` many small models at once; ``"auto"`` measures them and takes
            the fastest; ``"reference"`` is the plain implementation; ``"ray:4"``, or
            :class:`~fedshuffle.engines.Ray`, trains on a cluster. They differ in rounding only.
        device: ``"cpu"``, ``"cuda"`` or ``"mps"``; by default that of the model.
        evaluate: an :class:`~fedshuffle.Evaluation`, or a function that is called with a copy of
            the model, in evaluation mode and without gradients, and returns numbers for the
            history. It may change the copy, such as fine-tune it.
        evaluate_every: evaluate after every this many rounds, and after the last.
        out: a folder for metrics and checkpoints (see :mod:`fedshuffle.training.run_folder`), or a
            ``RunFolder`` with its own ``keep`` and its own hint how to resume.
        resume: whether to resume the run in ``out``; the result is that of a run never
            interrupted. The model gives the architecture and what is frozen.
        checkpoint_every: save after every this many rounds, and after the last.
        keep: the number of checkpoints to keep.
        record_cohorts: whether records list the clients of the round; they follow from the seed.
        tensorboard: whether to write every record to ``out/tensorboard`` as well.
        progress: whether to show a progress bar on the error stream.

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
    engines.check(engine)
    for option, needed in {"tensorboard": tensorboard, "resume": resume}.items():
        if needed and out is None:
            raise FedShuffleError(f"{option}=True needs the folder of the run: give it as out.")
    folder = out if out is None or isinstance(out, RunFolder) else RunFolder(out, keep)
    if tensorboard:  # fail before training if it is missing
        board = optional_import("torch.utils.tensorboard", "tensorboard=True", "tensorboard")
    begun = folder.settings() if folder and resume else {"rounds": rounds}
    step_size = schedules.resolve(step_size, begun["rounds"])
    server_step_size = schedules.resolve(server_step_size, begun["rounds"])
    run = Run(federation, method, sampling, work, step_size, server_step_size, seed)
    if (place := devices.check(device)) is not None:
        model = copy.deepcopy(model).to(place)
    problem = Problem(model, loss, run.federation)
    _warn_of_evaluation_mode(model)
    evaluation = evaluate.with_loss(loss) if isinstance(evaluate, _OURS) else None
    if evaluation:
        with error_context("evaluation before training"):
            _check_names(evaluation.names)
            evaluation.check(problem.copy(problem.start))
    elif not (evaluate is None or callable(evaluate)):
        raise FedShuffleError(
            f"evaluate is {evaluate!r:.60}, but must be a function or Evaluation."
        )

    with ExitStack() as stack:
        store = None
        if folder:
            folder.check(resume)
            stack.enter_context(interrupted_once())
            stack.enter_context(folder.locked())
            store = folder.client_store(len(problem.start), problem.dtype)
        if resume:
            engine = engines.resumed(engine, str(begun.get("engine", "sequential")))
        runner, why = _engine(engine, problem, run)
        stack.enter_context(closing(runner))
        if progress and why:
            print(f"engine {runner.name} ({why})", file=sys.stderr)
        state = run.start(problem.start, store)
        history: list[dict[str, Any]] = []
        clients: ClientTable | None = None
        if folder:
            settings = {
                **run.settings(begun["rounds"]),
                "engine": runner.name,  # another engine rounds differently
                "loss": fingerprint.function(loss),
                "parameters": len(problem.start),
                "dtype": str(problem.dtype),
                "model_sha256": fingerprint.architecture(model),
                "frozen_sha256": fingerprint.frozen(model),
                "rounds": rounds,
            }
            state = folder.begin(settings, state, resume)
            history = folder.metrics()
            stack.enter_context(folder.saved_when_stopped())
        stopped = error_context(lambda e: f"round {len(history)}: {user_error(e)}.", SystemExit)
        stack.enter_context(stopped)  # or the program would end without a word
        # Whether the given model is the initial one.
        start_known = not resume or fingerprint.tensor(problem.start) == begun["start_sha256"]
        start_loss = None
        if start_known and evaluation and (name := monitoring.monitored_loss(evaluation.names)):
            with error_context("evaluation before training"):
                start_loss = name, evaluation(problem.copy(problem.start))[name]
        monitor = monitoring.DivergenceMonitor(start_loss, history)
        shown = [stack.enter_context(monitoring.training_progress(progress, rounds, history))]
        if folder and tensorboard:
            path = folder.path / "tensorboard"
            log = monitoring.tensorboard_log(board.SummaryWriter, path, history)
            shown.append(stack.enter_context(log))
        begin = time.perf_counter()
        remaining = simulate(runner, [run], max(0, rounds - state.round), [state])
        for (state,) in remaining:
            last = state.round == rounds
            record = _costs(run, state, record_cohorts)
            record["seconds"] = time.perf_counter() - begin
            if evaluate and (last or state.round % evaluate_every == 0):
                measured = evaluation or evaluate
                metrics, clients = _metrics(measured, problem.copy(state.x), state.round)
                record |= metrics
            history.append(record)
            if folder:
                folder.add(record, state, save=last or state.round % checkpoint_every == 0)
            for show in shown:
                show(record)
            monitor.add(record)
            begin = time.perf_counter()
        if monitor.name is None and start_known:  # no loss was evaluated
            monitor = monitoring.DivergenceMonitor(("loss", _sampled_loss(problem, problem.start)))
            monitor.add({"round": state.round, "loss": _sampled_loss(problem, state.x)})
    if folder and clients is not None:
        clients.to_csv(folder.path / "clients.csv")
    where = folder.path if folder else None
    return Result(problem.copy(state.x), history, where, runner.name, clients, monitor.diverged)


def _sampled_loss(problem: Problem, x: Tensor) -> float:
    """The loss over 256 training examples that are spread over the federation."""
    rows = np.unique(np.linspace(0, problem.federation.offsets[-1] - 1, 256).astype(np.int64))
    one_thread = threads_for(problem, len(rows))
    with error_context("loss after training"), one_thread, model_randomness(problem, seed=0):
        return float(problem.loss(problem.copy(x), *problem.batch(rows)).detach())


def _warn_of_evaluation_mode(model: nn.Module) -> None:
    """Warn if a whole model is in evaluation mode and a layer would drop something."""
    for name, module in () if model.training else model.named_modules():
        share = getattr(module, "dropout", None)  # of attention and recurrent layers
        drops = isinstance(share, float) and share > 0
        drops |= "drop" in type(module).__name__.lower() and getattr(module, "p", 1) > 0
        if drops and not module.training:
            warnings.warn(
                f"the model is in evaluation mode, so its layer {name!r} drops nothing in training."
                " Call model.train() first; then put single layers into evaluation mode, if that"
                " is what you want.",
                stacklevel=3,
            )
            return


def _engine(name: str | Ray, problem: Problem, run: Run) -> tuple[Engine, str]:
    """The engine of that name; for ``"auto"`` the engine chosen, and why."""
    if name != "auto":
        return engines.make(name, problem), ""
    for round in range(100):
        request = run.local_training(replace(run.start(problem.start), round=round))
        if request is not None:
            return engines.choose(problem, request)
    return engines.make("sequential", problem), "no client takes part in the first rounds"


def _costs(run: Run, state: State, record_cohorts: bool) -> dict[str, Any]:
    """The clients, steps and bytes of the round that led to this state."""
    cohort = run.cohort(state.round - 1)
    asked, number = len(cohort.clients), state.x.element_size()
    sent = asked if state.sent is None else state.sent
    norms = 0 if state.sent is None else asked * number  # all send the norm of their update
    size = 0 if run.method.pooled else len(state.x) * number  # pooled data is not sent
    direction = run.method.direction
    costs = {
        "round": state.round,
        "clients": asked,
        "steps": int(cohort.done.sum()),
        "bytes_down": round(direction.down * size * asked),
        "bytes_up": round(((direction.up - 1) * asked + sent) * size) + norms,
    }
    return costs | ({"cohort": cohort.clients.tolist()} if record_cohorts else {})


def _metrics(
    evaluate: Evaluate, model: nn.Module, round: int
) -> tuple[dict[str, float], ClientTable | None]:
    """The metrics, where all that is not finite is NaN, the time, and the table of clients."""
    begun = time.perf_counter()
    with error_context(f"evaluation after round {round}"), evaluation_mode(model):
        found = evaluate.evaluate(model) if isinstance(evaluate, _OURS) else (evaluate(model), None)
        values, clients = found
        metrics = {name: number(value, f"metric {name!r}") for name, value in values.items()}
        _check_names(metrics)
    record = {name: v if math.isfinite(v) else math.nan for name, v in metrics.items()}
    return record | {"evaluation_seconds": time.perf_counter() - begun}, clients


def _check_names(names: Iterable[str]) -> None:
    if taken := set(names) & set(monitoring.RECORD_KEYS):
        raise FedShuffleError(f"evaluate may not return {min(taken)!r}: rename that metric.")
