"""A simulation of federated training, one round at a time."""

import copy
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from fedshuffle import devices, engines, fingerprint, methods, schedules
from fedshuffle._arrays import FloatArray, expect, number
from fedshuffle.availability import Availability
from fedshuffle.engines import Engine, Loss, Problem, Ray
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.finetuning.exact import check_prepared
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Cohort, CohortMoments, Direction, Method, Unnormalised
from fedshuffle.privacy import Privacy
from fedshuffle.probabilities import Estimate
from fedshuffle.sampling import Sampling
from fedshuffle.schedules import Schedule
from fedshuffle.state import State
from fedshuffle.timing import NO_BYTES, Clock, TrainingSchedule, UntilDeadline
from fedshuffle.training.client_state import ClientStateStore
from fedshuffle.training.message_sizes import message_sizes
from fedshuffle.training.rounds import Run, run_round
from fedshuffle.transforms import Channel, DownLink, Transform

_RARELY = 1e-3  # a client that is late less often hardly counts less


class Simulation:
    """Federated training, round by round: for those who write the loop themselves.

    A state never changes: a step gives the next one, so a state can be kept, compared and stepped
    from again. :func:`fedshuffle.train` is a loop over :meth:`step`. The engine starts with the
    first round.

    Args:
        step_size: a number or a function of the round; not the name of a schedule, which needs to
            know the number of rounds.
        server_step_size: the same.
        rounds: the number of rounds in all, for privacy by ``epsilon`` and for an availability that
            drifts.

    All other arguments are those of :func:`fedshuffle.train`.

    >>> from fedshuffle import Federation, losses
    >>> federation = Federation.from_arrays(torch.ones(6, 1), torch.eye(6), sizes=[1, 2, 3])
    >>> model = nn.Linear(1, 6, bias=False)
    >>> with Simulation(model, federation, loss=losses.squared_error) as simulation:
    ...     state = simulation.init()
    ...     while state.round < 100:
    ...         state, record = simulation.step(state)
    >>> record["round"], record["clients"], record["steps"]
    (100, 3, 6)
    >>> bool((simulation.model(state).weight.flatten() - 1 / 6).abs().max() < 0.05)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        *,
        loss: Loss,
        method: str | Method = "fedshuffle",
        sampling: str | Sampling = "full",
        work: LocalWork | None = None,
        step_size: Schedule = 0.1,
        server_step_size: Schedule = 1.0,
        transforms: Sequence[Transform] = (),
        channel: str | Channel | None = None,
        down_channel: str | DownLink | None = None,
        privacy: Privacy | None = None,
        availability: str | Availability | None = None,
        schedule: str | TrainingSchedule | None = None,
        clock: str | Clock | None = None,
        probabilities: str | Estimate | None = None,
        rounds: int | None = None,
        seed: int = 0,
        engine: str | Ray = "sequential",
        device: str | torch.device | None = None,
        record_cohorts: bool = False,
        record_clients: bool = False,
    ) -> None:
        expect(model, nn.Module, "model")
        engines.check(engine)
        for name, size in {"step_size": step_size, "server_step_size": server_step_size}.items():
            if isinstance(size, str):
                raise FedShuffleError(
                    f"{name} is {size!r}, and a schedule by name needs the number of rounds: give"
                    f" schedules.resolve({size!r}, rounds=...)."
                )
        sizes = NO_BYTES if clock is None else message_sizes(model, method, transforms, channel)
        self.run = Run(
            federation,
            methods.get(method).with_probabilities(probabilities),
            sampling,
            work,
            step_size,
            server_step_size,
            seed,
            transforms,
            channel,
            down_channel,
            privacy,
            rounds,
            availability=availability,
            schedule=schedule,
            clock=clock,
            message_sizes=sizes,
        )
        place = devices.check(device)
        if place is not None and any(p.device != place for p in model.parameters()):
            model = copy.deepcopy(model).to(place)
        check_prepared(model, self.run.chain.transforms)
        self.problem = Problem(model, loss, self.run.federation)
        if not (optimiser := self.run.workload.optimiser).elementwise:
            optimiser.check(list(self.problem.parameters.values()))
        self.engine_reason = ""
        """Why ``engine="auto"`` chose its engine."""
        self._engine: Engine | None = None
        self._engine_name = engine
        self._record_cohorts = record_cohorts or record_clients
        self._record_clients = record_clients
        _warn_of_evaluation_mode(model)
        _warn_of_unfinished_work(self.run)

    @property
    def engine(self) -> Engine:
        """The engine that trains; it starts when it is first asked for."""
        if self._engine is None:
            made = _engine(self._engine_name, self.problem, self.run)
            self._engine, self.engine_reason = made
        return self._engine

    def init(self, store: ClientStateStore | None = None) -> State:
        """The state before the first round; client state, if any, goes to the store."""
        return self.run.start(self.problem.start, store)

    def step(self, state: State, step_factor: float = 1.0) -> tuple[State, dict[str, Any]]:
        """The state after one more round, and the record of that round.

        ``step_factor`` multiplies the step size of this round.
        """
        begin, run = time.perf_counter(), self.run
        if step_factor != 1.0:
            factor, base = number(step_factor, "step_factor", within="(0, inf)"), run.step_size
            run = copy.copy(run)
            run.step_size = lambda round: factor * schedules.value(base, round, "step size")
        (after,) = run_round(self.engine, [run], [state])
        record = self._record(after)
        if step_factor != 1.0:
            record["step_factor"] = step_factor
        return after, {**record, "seconds": time.perf_counter() - begin}

    def model(self, state: State) -> nn.Module:
        """A new module with the parameters of a state."""
        return self.problem.copy(state.x)

    def settings(self, rounds: int) -> dict[str, Any]:
        """What the trajectory over the rounds depends on, as plain data."""
        return {
            **self.run.settings(rounds),
            "engine": self.engine.name,  # another engine rounds differently
            "loss": fingerprint.function(self.problem.loss),
            "parameters": len(self.problem.start),
            "dtype": str(self.problem.dtype),
            "model_sha256": fingerprint.architecture(self.problem.model),
            "frozen_sha256": self.problem.frozen_sha256,
        }

    def close(self) -> None:
        """End the engine's workers; another step would start them again."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, state: State) -> dict[str, Any]:
        """The record of the round that led to this state."""
        cohort = self.run.cohort(state.round - 1)
        record: dict[str, Any] = {
            "round": state.round,
            "clients": len(cohort.clients),
            "steps": int(cohort.done.sum()),
            **_traffic(state.metrics),
            **reduced(state.metrics, cohort),
        }
        if self.run.timing.clock is not None:
            record["time"] = state.time
        if self.run.mechanism:
            record["epsilon"] = self.run.mechanism.epsilon(state.round)
        if self._record_cohorts:
            record["cohort"] = cohort.clients.tolist()
        if self._record_clients:
            record["per_client"] = {name: v.tolist() for name, v in state.metrics.items()}
        return record


def reduced(metrics: Mapping[str, FloatArray], cohort: Cohort) -> dict[str, float]:
    r"""The metrics of a round, of numbers per client: means, without clients that report NaN.

    Clients count equally, except in the training loss, where client i counts :math:`w_i / p_i`:

    .. math:: \frac{\sum_{i \in S} (w_i / p_i)\, \ell_i}{\sum_{i \in S} w_i / p_i}

    estimates the objective along the local steps. ``update_norm`` and ``staleness`` also have their
    largest values.
    """
    found: dict[str, float] = {}
    for name, values in metrics.items():
        known = ~np.isnan(values)
        if name.startswith("bytes_") or not known.any():
            continue
        weights = (
            cohort.weight / cohort.probability if name == "train_loss" else np.ones(len(known))
        )
        found[name] = float(np.average(values[known], weights=weights[known]))
        if name in ("update_norm", "staleness"):
            found[f"{name}_max"] = float(values[known].max())
    return {name: v if math.isfinite(v) else math.nan for name, v in found.items()}


def _traffic(metrics: Mapping[str, FloatArray]) -> dict[str, int]:
    """The bytes that all clients of a round received and sent."""
    return {
        name: round(float(np.sum(metrics.get(name, 0.0)))) for name in ("bytes_down", "bytes_up")
    }


def _engine(name: str | Ray, problem: Problem, run: Run) -> tuple[Engine, str]:
    """The engine of that name; for ``"auto"`` the engine chosen, and why."""
    if name != "auto":
        return engines.make(name, problem), ""
    for round in range(100):
        request = run.local_training(replace(run.start(problem.start), round=round))
        if request is not None:
            return engines.choose(problem, request)
    return engines.make("sequential", problem), "no client takes part in the first rounds"


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


def _warn_of_unfinished_work(run: Run) -> None:
    """Warn if clients stop at a deadline, and a method that would be right otherwise counts what
    they send by the steps that they did.
    """
    stop, rule = run.workload.work.interruption, run.method.averaging
    right = rule.by_probability or isinstance(rule.normaliser, Unnormalised)
    if not isinstance(stop, UntilDeadline) or not right or not _by_updates(run.method.direction):
        return
    steps = run.workload.possible_steps[0].max(axis=1)  # one step is done, or the client is away
    done = np.where(steps > 1, stop.tasks.in_time(stop.deadline).min(axis=1), 1.0)
    slowest = np.array([int(done.argmin())])
    if done.min() > 1 - _RARELY:
        return
    clients, planned = (run.federation, run.sampling, run.workload, slowest), steps[slowest]
    full, short = (Cohort.of(*clients, (planned, some)) for some in (planned, planned // 2))
    one, other = (
        rule.client_weights(c) * rule.step_scale(c) * c.done_length for c in (full, short)
    )
    if np.allclose(one, other):
        return
    alone, _, _ = run.method.name.partition("+")
    remedy = "fedshuffle-gen" if alone == "fedshuffle" else f"{alone}+fedshuffle-gen"
    advice = f"Use method {remedy}, which weights by the share of the work that was done."
    if run.mechanism:  # its noise would have to cover a client that did one step of all
        advice = "Leave out '+partial', as weighting by the work that was done needs more noise."
    warnings.warn(
        f"by the deadline client {run.federation.ids[slowest[0]]} is done with all its steps in"
        f" {done.min():.0%} of its rounds, and {run.method.name} counts clients by the steps that"
        f" they did, so slow ones count less than you meant. {advice}",
        stacklevel=3,
    )


def _by_updates(direction: Direction) -> bool:
    """Whether clients count by what they send, and not, as in SCAFFOLD, by what the server knows of
    them, or together with who else takes part.
    """
    if direction.needs_joint:
        return False
    one = np.ones(2)
    whole, part = (
        direction.effective_weights(CohortMoments(one, one, 1.0, sent, estimate=one))
        for sent in (one, np.array([1.0, 0.5]))
    )
    return whole is None or part is None or not np.allclose(part / part.sum(), whole / whole.sum())
