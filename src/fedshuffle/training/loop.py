"""Training a model: the rounds of a simulation, evaluated, recorded, and seen by callbacks."""

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from fedshuffle import engines, fingerprint, schedules
from fedshuffle._arrays import count, number
from fedshuffle._terminal import interrupted_once
from fedshuffle.availability import Availability
from fedshuffle.engines import Loss, Problem, Ray
from fedshuffle.engines.base import model_randomness
from fedshuffle.engines.copies import check_unwritten, samples
from fedshuffle.engines.cpu_tuning import threads_for
from fedshuffle.errors import FedShuffleError, error_context, user_error
from fedshuffle.evaluation import ClientTable, Evaluation, Evaluations, evaluation_mode
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.losses import counted
from fedshuffle.methods import Method
from fedshuffle.privacy import Privacy
from fedshuffle.probabilities import Estimate
from fedshuffle.probabilities.drift import drift_warning
from fedshuffle.sampling import AmongAvailable, Sampling
from fedshuffle.schedules import Schedule
from fedshuffle.state import State
from fedshuffle.timing import Clock, TrainingSchedule
from fedshuffle.training.callbacks import (
    Callback,
    Checkpointing,
    Progress,
    TensorBoard,
    TrainingContext,
)
from fedshuffle.training.callbacks.base import Callbacks, check_callbacks
from fedshuffle.training.monitoring import (
    RECORD_KEYS,
    TRAINING_METRICS,
    DivergenceMonitor,
    monitored_loss,
)
from fedshuffle.training.result import Result
from fedshuffle.training.rounds import Run
from fedshuffle.training.run_folder import RunFolder
from fedshuffle.training.simulation import Simulation
from fedshuffle.transforms import Channel, DownLink, Transform

Evaluate = Evaluation | Evaluations | Callable[[nn.Module], Mapping[str, float]]
"""What :func:`fedshuffle.train` evaluates with: an evaluation, several, or your own function."""
_OURS = (Evaluation, Evaluations)
_LARGE = 1 << 20  # parameters of a model that is not run on hundreds of examples at once
_DRIFTED = 0.01  # by which a client counts too much before a run warns that its drift ends early


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
    transforms: Sequence[Transform] = (),
    channel: str | Channel | None = None,
    down_channel: str | DownLink | None = None,
    privacy: Privacy | None = None,
    availability: str | Availability | None = None,
    schedule: str | TrainingSchedule | None = None,
    clock: str | Clock | None = None,
    probabilities: str | Estimate | None = None,
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
    record_clients: bool = False,
    tensorboard: bool = False,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train a model over a federation. The given model is not changed; the trained one shares the
    memory of frozen parameters with it.

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
        transforms: what happens to a client's update on its way to the server (see
            :mod:`fedshuffle.transforms`).
        channel: how updates are compressed: ``"topk:0.01+ef"``, ``"qsgd:4+diana"``, ``"float16"``
            and others, or a :class:`~fedshuffle.transforms.Channel`.
        down_channel: how the model is compressed on its way to clients, such as ``"qsgd:8"``.
        privacy: a :class:`~fedshuffle.Privacy`: updates are clipped and their sum gets noise. The
            run stops when its ``epsilon`` is spent.
        availability: who is there: ``"markov:on=0.1,off=0.2"``, ``"cyclic:24:0.5"`` and others, or
            an :class:`~fedshuffle.availability.Availability`. The sampling draws among those.
        schedule: for whom the server waits: ``"wait"`` for the whole cohort (the default),
            ``"deadline:60"``, ``"over:8of10"``, ``"fedbuff:K=10,C=100"`` and others (see
            :mod:`fedshuffle.timing`).
        clock: how long clients take, such as ``"lognormal:0.1:1"`` seconds per local step, or a
            :class:`~fedshuffle.timing.Clock`. Records then have the simulated ``time``.
        probabilities: ``"estimate"`` divides by inclusion probabilities that are estimated from who
            took part so far, as if nobody knew them (see :mod:`fedshuffle.probabilities`).
        seed: determines everything random.
        engine: ``"sequential"`` trains one client after another, ``"sequential:2"`` on two
            threads, ``"vectorized"`` many small models at once; ``"auto"`` measures them and takes
            the fastest; ``"reference"`` is the plain implementation; ``"ray:4"``, or
            :class:`~fedshuffle.engines.Ray`, trains on a cluster. They differ in rounding only.
        device: ``"cpu"``, ``"cuda"`` or ``"mps"``; by default that of the model.
        evaluate: an :class:`~fedshuffle.Evaluation`, or a function that is called with a copy of
            the model, in evaluation mode and without gradients, and returns numbers for the
            history. It may change the copy, such as fine-tune it, except for frozen parameters,
            which copies share.
        evaluate_every: evaluate after every this many rounds, and after the last.
        out: a folder for metrics and checkpoints, or a
            ``RunFolder`` with its own ``keep`` and its own hint how to resume.
        resume: whether to resume the run in ``out``; the result is that of a run never
            interrupted. The model gives the architecture and what is frozen.
        checkpoint_every: save after every this many rounds, and after the last.
        keep: the number of checkpoints to keep.
        record_cohorts: whether records list the clients of the round; they follow from the seed.
        record_clients: whether records also hold the metrics of each client of the round.
        tensorboard: whether to write every record to ``out/tensorboard`` as well.
        progress: whether to show a progress bar on the error stream.
        callbacks: what else happens around the rounds (see :mod:`fedshuffle.training.callbacks`).

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
    shortcuts: list[Callback] = [Progress()] if progress else []
    shortcuts += [TensorBoard()] if tensorboard else []
    shortcuts += [Checkpointing(out, checkpoint_every, keep)] if out is not None else []
    called, folder = _all_callbacks(callbacks, shortcuts)
    for option, needed in {"tensorboard": tensorboard, "resume": resume}.items():
        if needed and folder is None:
            raise FedShuffleError(f"{option}=True needs the folder of the run: give it as out.")
    begun = folder.settings() if folder and resume else {"rounds": rounds}
    if resume:
        engine = engines.resumed(engine, str(begun.get("engine", "sequential")))
    sim = Simulation(
        model,
        federation,
        loss=loss,
        method=method,
        sampling=sampling,
        work=work,
        step_size=schedules.resolve(step_size, begun["rounds"]),
        server_step_size=schedules.resolve(server_step_size, begun["rounds"]),
        transforms=transforms,
        channel=channel,
        down_channel=down_channel,
        privacy=privacy,
        availability=availability,
        schedule=schedule,
        clock=clock,
        probabilities=probabilities,
        rounds=begun["rounds"],
        seed=seed,
        engine=engine,
        device=device,
        record_cohorts=record_cohorts,
        record_clients=record_clients,
    )
    evaluator = _Evaluator(evaluate, sim.problem)
    last = rounds
    if (private := sim.run.mechanism) and private.max_rounds is not None:
        last = min(rounds, private.max_rounds)

    _warn_of_outlasted_drift(sim.run, last)

    with ExitStack() as stack:
        if folder:
            folder.check(resume)
            stack.enter_context(interrupted_once())
            stack.enter_context(folder.locked())
        stack.enter_context(sim)
        store = folder.client_store(len(sim.problem.start), sim.problem.dtype) if folder else None
        state, history, clients = sim.init(store), list[dict[str, Any]](), None
        if folder:
            control = [fingerprint.part(one) for one in called if one.changes_step_size]
            settings = {"step_size_control": ", ".join(control) or None, "rounds": rounds}
            state = folder.begin(sim.settings(begun["rounds"]) | settings, state, resume)
            history = folder.metrics()
            stack.enter_context(folder.saved_when_stopped())
        stopped = error_context(lambda e: f"round {len(history)}: {user_error(e)}.", SystemExit)
        stack.enter_context(stopped)  # or the program would end without a word
        # Whether the given model is the initial one.
        start_known = not resume or fingerprint.tensor(sim.problem.start) == begun["start_sha256"]
        monitor = DivergenceMonitor(evaluator.start_loss() if start_known else None, history)
        identity = (folder.path, str(folder.settings()["run"])) if folder else (None, None)
        context = TrainingContext(sim, last, history, evaluator.names, *identity)
        calls = stack.enter_context(Callbacks(called, context))
        calls.start()
        while state.round < last and calls.stopped is None:
            state, record = sim.step(state, calls.step_factor)
            if evaluate and (state.round == last or state.round % evaluate_every == 0):
                metrics, clients = evaluator(sim.model(state), record)
                record |= metrics
            history.append(record)
            calls.round(record, state)
            monitor.add(record)
            if start_known and monitor.suspects(record):
                monitor.measured(*_sampled_losses(sim, state), state.round)
        if start_known and monitor.name is None:  # no loss was evaluated
            monitor.measured(*_sampled_losses(sim, state), state.round)
        _warn_of_drift(sim.run, state.round)
        result = Result(
            sim.model(state),
            history,
            identity[0],
            sim.engine.name,
            clients,
            monitor.diverged,
            calls.stopped if last == rounds else calls.stopped or _spent(sim.run, last),
        )
        calls.end(result)
    return result


def _warn_of_outlasted_drift(run: Run, rounds: int) -> None:
    """Warn if known inclusion probabilities are means over a drift that ends before the run."""
    sampling, rule, weights = run.sampling, run.method.averaging, run.federation.weights
    if not rule.by_probability or rule.estimate is not None:
        return
    if not isinstance(sampling, AmongAvailable) or sampling.availability.repeats:
        return
    if (after := rounds - sampling.period) <= 0:
        return
    # A client counts p-bar / p, where p is its mean over the drift and p-bar over the run.
    counts = sampling.period + after * sampling.at(sampling.period - 1).inclusion / sampling.p
    counts /= weights @ counts
    most = int(counts.argmax())
    if counts[most] > 1 + _DRIFTED:
        warnings.warn(
            f"the availability drifts over {sampling.period} rounds and the run has {rounds}, so"
            " the inclusion probabilities, means over the drift, do not fit the run: client"
            f" {run.federation.ids[most]} counts {counts[most]:.2f} times what you meant. Begin a"
            f' run whose drift takes {rounds} rounds, or one with probabilities="estimate:ewma".',
            stacklevel=3,
        )


def _warn_of_drift(run: Run, rounds: int) -> None:
    if past := run.participation:
        what = f"who takes part changed over the {rounds} rounds"
        if said := drift_warning(past.estimate, past.drift(rounds), what, "probabilities"):
            warnings.warn(said, stacklevel=3)


def _spent(run: Run, last: int) -> str:
    assert run.mechanism is not None
    epsilon = run.mechanism.privacy.epsilon
    return f"the privacy budget, epsilon {epsilon:g}, is spent after round {last}"


def _all_callbacks(
    callbacks: Sequence[Callback], shortcuts: Sequence[Callback]
) -> tuple[list[Callback], RunFolder | None]:
    """All callbacks in the order in which they are called, and the folder of the run, if any."""
    found = [*shortcuts, *check_callbacks(callbacks)]
    saving = [callback for callback in found if isinstance(callback, Checkpointing)]
    if len(saving) > 1:
        first, second = (str(callback.folder.path) for callback in saving[:2])
        raise FedShuffleError(
            f"a run has one folder, not both {first!r} and {second!r}: give either out or one"
            " Checkpointing."
        )
    # Checkpoints first, so that an error of another callback loses nothing.
    found.sort(key=lambda callback: not isinstance(callback, Checkpointing))
    return found, saving[0].folder if saving else None


class _Evaluator:
    """Evaluates a model for the record of a round, with an Evaluation or a function."""

    def __init__(self, evaluate: Evaluate | None, problem: Problem) -> None:
        if not (evaluate is None or callable(evaluate)):
            raise FedShuffleError(
                f"evaluate is {evaluate!r:.60}, but must be a function or Evaluation."
            )
        ours = evaluate.with_loss(problem.loss) if isinstance(evaluate, _OURS) else None
        self._evaluate, self._ours, self._problem = evaluate, ours, problem
        self.names: Sequence[str] | None = () if evaluate is None else None
        """The names of its metrics; None if a function gives them."""
        if ours:
            self.names = ours.names
            with error_context("evaluation before training"):
                _check_names(ours.names)
                ours.check(problem.copy(problem.start))

    def start_loss(self) -> tuple[str, float] | None:
        """The name and the value before training of the loss that shows divergence, if any."""
        name = monitored_loss(self.names or ())
        if self._ours is None or name is None:
            return None
        with error_context("evaluation before training"):
            return name, self._ours(self._problem.copy(self._problem.start))[name]

    def __call__(
        self, model: nn.Module, record: Mapping[str, Any]
    ) -> tuple[dict[str, float], ClientTable | None]:
        """The metrics, where all that is not finite is NaN, the time, and the table of clients."""
        begun, clients = time.perf_counter(), None
        with error_context(f"evaluation after round {record['round']}"), evaluation_mode(model):
            if self._ours:
                values, clients = self._ours.evaluate(model)
            else:
                assert callable(self._evaluate)
                before = samples(model)
                values = dict(self._evaluate(model))
                check_unwritten(self._problem.model, before, "it")
            metrics = {name: number(value, f"metric {name!r}") for name, value in values.items()}
            _check_names(metrics, record)
        found = {name: v if math.isfinite(v) else math.nan for name, v in metrics.items()}
        return found | {"evaluation_seconds": time.perf_counter() - begun}, clients


def _check_names(names: Iterable[str], record: Iterable[str] = ()) -> None:
    if taken := set(names) & {*RECORD_KEYS, *TRAINING_METRICS, *record}:
        raise FedShuffleError(
            f"evaluate may not return {min(taken)!r}, which records hold already: rename that"
            " metric, or give the Evaluation a prefix, such as 'training_'."
        )


def _sampled_losses(sim: Simulation, state: State) -> tuple[float, float]:
    """The loss of a state and of the initial model over 256 training examples that are spread over
    the federation; of a large model in minibatches, which fit into memory.
    """
    problem, found = sim.problem, list[float]()
    rows = np.unique(np.linspace(0, problem.federation.offsets[-1] - 1, 256).astype(np.int64))
    large = sum(p.numel() for p in problem.model.parameters()) > _LARGE
    size = min(sim.run.workload.batch_size, len(rows)) if large else len(rows)
    for x in (state.x, problem.start):
        model, total, count = problem.copy(x), 0.0, 0.0
        one_thread = threads_for(problem, len(rows))
        named = error_context(f"loss after round {state.round}")
        with named, one_thread, model_randomness(problem, seed=0):
            for begin in range(0, len(rows), size):
                batch = problem.batch(rows[begin : begin + size])
                values = counted(problem.loss, model, batch) if large else 1.0
                count += values
                total += values * float(problem.loss(model, *batch).detach()) if values else 0.0
        found.append(total / count if count else 0.0)
    return found[0], found[1]
