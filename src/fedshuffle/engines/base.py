"""What an engine is: it answers the requests of methods, and does not know the methods."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray
from fedshuffle.engines.problem import Problem, forked
from fedshuffle.errors import (
    DivergedError,
    FedShuffleError,
    TrainingError,
    error_context,
    user_error,
)
from fedshuffle.kernel import Answer, ClientTask, FullGradient, LocalTraining
from fedshuffle.transforms import ClientContext, Message
from fedshuffle.transforms.base import Numbers, scaled


class Engine(Protocol):
    """Answers many requests at once, so that runs in lockstep can share the work."""

    name: str
    """The name by which :func:`fedshuffle.engines.make` makes the same engine; runs record it."""
    problem: Problem

    def local_training(self, requests: Sequence[LocalTraining]) -> list[Answer]:
        """For every request the weighted sums of what clients send, one row per sum."""

    def full_gradients(self, requests: Sequence[FullGradient]) -> list[Answer]:
        """For every request the weighted full gradients, one table per sum, a row per point."""

    def close(self) -> None:
        """Release what the engine holds outside this process; it cannot be used afterwards."""
        return


class OneWorker(Engine):
    """An engine that works alone, and that another thread can stop."""

    stop = False
    """Set it to abandon the current request with :class:`Stopped` at the next step."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def own_gradients(self, x: Tensor, tasks: Sequence[ClientTask]) -> Tensor:
        """The full gradient of each task's client at one point, a row each."""
        with torch.inference_mode(False):  # local training may be in it
            rows = x.new_empty(len(tasks), len(x))
            for row, task in zip(rows, tasks, strict=True):
                stream, one = task.minibatches, np.ones((1, 1))
                request = FullGradient(
                    (x,),
                    np.array([stream.client]),
                    one,
                    stream.round,
                    task.weight_decay,
                    seed=stream.seed,
                    stream_id=stream.stream_id,
                )
                row.copy_(self.full_gradients([request])[0].sums[0, 0])
        return rows


class Stopped(BaseException):
    """Another worker failed or was interrupted, so this result is no longer needed."""


def client_context(
    problem: Problem, client: int, round: int, stage: str
) -> AbstractContextManager[None]:
    """Add the client, the round and the stage to what the user's model or loss raises."""
    return error_context(
        lambda error: TrainingError(
            str(error) if isinstance(error, FedShuffleError) else user_error(error),
            client=problem.federation.ids[client],
            round=round,
            stage=stage,
        )
    )


def check_model(problem: Problem) -> bool:
    """Run the model once, to report what is wrong with it; whether it draws random numbers."""
    with client_context(problem, 0, 0, "first look at the model"):
        return problem.random


@contextmanager
def model_randomness(problem: Problem, seed: int) -> Iterator[None]:
    """Seed the model's own randomness (dropout), and restore torch's random state afterwards."""
    if not problem.random:
        yield
        return
    with forked(problem.device):
        torch.manual_seed(seed)
        yield


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of the loss by each parameter; zero for those that it does not use."""
    if loss.ndim != 0:
        raise FedShuffleError(
            f"the loss has shape {tuple(loss.shape)}, but it must be one number: return the mean"
            " over the minibatch."
        )
    found: tuple[Tensor | None, ...] = (None,)
    if loss.requires_grad:
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    if all(grad is None for grad in found):
        raise FedShuffleError(
            "the loss does not depend on the model it is given. If the model has adapters, they"
            " must be active, and not merged."
        )
    pairs = zip(found, parameters, strict=True)
    return tuple(torch.zeros_like(p) if g is None else g for g, p in pairs)


class Gathered:
    """The answer to a local training, gathered as clients finish: running sums, no list of updates.

    ``own_gradients(tasks)`` computes the clients' full gradients at the global model, for
    transforms that need them; ``ids`` are those of all clients, for errors.
    """

    def __init__(
        self,
        request: LocalTraining,
        own_gradients: Callable[[Sequence[ClientTask]], Tensor],
        ids: Sequence[object] | None = None,
    ) -> None:
        x, tasks = request.start, request.tasks
        self._request, self._own_gradients, self._ids = request, own_gradients, ids
        self.sums = x.new_zeros(request.sums, len(x))
        self._states = None if request.states is None else torch.empty_like(request.states)
        self._change = None if request.state_weights is None else torch.zeros_like(x)
        self._metrics: dict[str, FloatArray] = {}
        if request.chain and tasks:
            streams = [task.minibatches for task in tasks]
            clients = [s.client if s.stream_id is None else s.stream_id for s in streams]
            self._any_layout = request.chain.any_layout
            self._everyone = ClientContext(
                seed=streams[0].seed,
                round=streams[0].round,
                clients=np.array(clients),
                steps=np.array([stream.steps for stream in streams]),
                step_sizes=np.array([task.step_size for task in tasks]),
                weights=np.array([task.weights[0] if len(task.weights) else 0.0 for task in tasks]),
                shared=request.shared,
            )

    def observe(self, rows: Sequence[int] | slice, /, **metrics: Numbers | float) -> None:
        """Record numbers of some tasks, by the name of the metric."""
        for name, values in metrics.items():
            known = self._metrics.get(name)
            if known is None:
                known = self._metrics[name] = np.full(len(self._request.tasks), math.nan)
            known[rows] = numbers(values) if isinstance(values, Tensor) else values

    def add(self, rows: Sequence[int], updates: Tensor, norms: Tensor | None = None) -> None:
        """Add what the clients of some tasks send; their updates, one row each, are overwritten."""
        tasks, factors = [self._request.tasks[k] for k in rows], None
        if self._request.chain:
            message = self._sent(rows, tasks, updates, norms)
            updates, factors = message.vectors, message.factors
        if len(tasks) == 1:
            if factors is not None:  # rounded as by a client that is elsewhere
                updates = scaled(updates, factors)
            for total, weight in zip(self.sums, tasks[0].weights, strict=True):
                total.add_(updates[0], alpha=float(weight))
        else:
            weights = np.array([task.weights for task in tasks]).T
            weights = weights if factors is None else weights * factors
            self.sums.addmm_(self.sums.new_tensor(weights), updates)

    def _sent(
        self,
        rows: Sequence[int],
        tasks: Sequence[ClientTask],
        updates: Tensor,
        norms: Tensor | None,
    ) -> Message:
        """What clients send for their updates, once their states and metrics are stored."""
        request, everyone = self._request, self._everyone
        places: Any = list(rows) if len(tasks) > 1 else slice(rows[0], rows[0] + 1)
        context = ClientContext(
            everyone.seed,
            everyone.round,
            everyone.clients[places],
            everyone.steps[places],
            everyone.step_sizes[places],
            everyone.weights[places],
            everyone.shared,
            None if self._any_layout else lambda: self._own_gradients(tasks),
            norms,
        )
        old = None if request.states is None else request.states[places]
        try:  # a context manager would cost more than some transforms
            message = request.chain.client(updates, old, context)
        except FedShuffleError as error:
            clients = [task.minibatches.client for task in tasks]
            raise _named(error, self._ids, clients, context.round) from error
        if old is not None and self._states is not None and message.state is not None:
            self._states[places] = message.state
            if self._change is not None and request.state_weights is not None:
                weights = old.new_tensor(request.state_weights[places])
                self._change.add_(weights @ (message.state - old))
        self.observe(places, **message.metrics)
        return message

    def answer(self, restore: Callable[[Tensor], Tensor] | None = None) -> Answer:
        """All that was gathered; ``restore`` brings the coordinates of the sums into order."""
        sums = self.sums if restore is None else restore(self.sums)
        return Answer(sums, self._states, self._change, self._metrics)


def numbers(values: Tensor) -> FloatArray:
    """A tensor of any dtype, on any device, as numbers of numpy."""
    found: FloatArray = values.cpu().double().numpy()  # MPS has no doubles, numpy no bfloat16
    return found


def norms(updates: Tensor) -> Tensor:
    """The norm of each row, or of one vector, without overflow in half precision."""
    wider = torch.float32 if updates.dtype in (torch.float16, torch.bfloat16) else None
    found: Tensor = torch.linalg.vector_norm(updates, dim=-1, dtype=wider)
    return found


def _named(
    error: FedShuffleError, ids: Sequence[object] | None, clients: Sequence[int], round: int
) -> FedShuffleError:
    """What a transform raised, with its clients and the round."""
    if isinstance(error, TrainingError):  # the full gradient of a client, which is named
        return error
    who = named_clients([str(k if ids is None else ids[k]) for k in clients])
    return TrainingError(str(error), client=who, round=round, stage="transforms")


def named_clients(ids: Sequence[str]) -> str:
    """Some clients, of which one is concerned, by the first few.

    >>> named_clients(["ann"]), named_clients("abcdefg")
    ('ann', 'one of a, b, c, d, e and 2 more')
    """
    more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
    return "one of " * (len(ids) > 1) + ", ".join(ids[:5]) + more


def transformed_gradients(
    request: FullGradient, rows: Tensor, ids: Sequence[object] | None = None
) -> Answer:
    """The answer to a request with a chain, from the full gradient of each client; ``ids`` are
    those of all clients, for errors.
    """
    if not len(rows):  # the part of a worker without clients
        return Answer(rows.new_zeros(request.weights.shape[1], 1, rows.shape[1]), request.states)
    ones, weights = np.ones(len(rows)), request.weights[:, 0]
    steps = np.ones(len(rows), dtype=np.int64)
    context = ClientContext(request.seed, request.round, request.clients, steps, ones, weights)
    rows = rows + request.weight_decay * request.points[0]
    try:
        message = request.chain.client(rows, request.states, context)
    except FedShuffleError as error:
        raise _named(error, ids, request.clients.tolist(), request.round) from error
    sums = rows.new_tensor(request.weights.T) @ message.values
    metrics = {
        name: numbers(values) if isinstance(values, Tensor) else np.asarray(values)
        for name, values in message.metrics.items()
    }
    return Answer(sums[:, None], message.state, None, metrics)


def not_finite(problem: Problem, task: ClientTask) -> DivergedError:
    """The error for an update with NaN or infinity."""
    batches = task.minibatches
    cause = "The step size is probably too large: lower it."
    if problem.dtype == torch.float16:  # the epsilon of Adam is zero there
        cause = "The model is in torch.float16, whose range is small: convert it, as by .float()."
    return DivergedError(
        f"the update is not finite after {batches.steps} steps of size {task.step_size:g}. {cause}",
        client=problem.federation.ids[batches.client],
        round=batches.round,
        stage="local training",
    )


def add_weight_decay(request: FullGradient, gradients: Tensor) -> Tensor:
    """Add the weight decay that is asked for to full gradients, in place."""
    if request.weight_decay:
        decay = gradients.new_tensor(request.weight_decay * request.weights.sum(axis=0))
        gradients.addcmul_(decay.view(-1, 1, 1), torch.stack(list(request.points)))
    return gradients


def finished_gradients(request: FullGradient, gradients: Tensor) -> Answer:
    """Full gradients with weight decay added; an error where they are not finite."""
    gradients = add_weight_decay(request, gradients)
    if not torch.isfinite(gradients).all():
        raise DivergedError(
            "the full gradient is not finite. The model has diverged: lower the step size.",
            client=f"among {len(request.clients)} of the cohort",
            round=request.round,
            stage="full gradient",
        )
    return Answer(gradients)
