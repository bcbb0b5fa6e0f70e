"""What an engine is: it answers the requests of methods, and knows nothing of methods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray
from fedshuffle.engines.problem import Problem, forked
from fedshuffle.errors import DivergedError, FedShuffleError, TrainingError, user_error
from fedshuffle.kernel import Order, Probe, Walk


class Engine(Protocol):
    """Answers many requests at once, so that runs in lockstep can share the work."""

    problem: Problem

    def walk(self, walks: Sequence[Walk]) -> list[Tensor]:
        """For every walk the sums of the updates, one row per sum."""

    def probe(self, probes: Sequence[Probe]) -> list[Tensor]:
        """For every probe the weighted full gradients, one table per sum, with a row per point."""


class OneWorker(Engine, Protocol):
    """An engine that another thread can stop."""

    stop: bool
    """Set it, and what is being done is abandoned with :class:`Stopped` at the next step."""


class Stopped(BaseException):
    """Somebody else failed or was interrupted, so nobody waits for this any more."""


@contextmanager
def named(problem: Problem, client: int, round: int, stage: str) -> Iterator[None]:
    """Give what the user's model or loss raises the client, the round and the stage."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise TrainingError(
            user_error(error),
            client=problem.federation.ids[client],
            round=round,
            stage=stage,
        ) from error


def first_look(problem: Problem) -> bool:
    """Run the model once, so that what is wrong with it is said at once; whether it is random."""
    with named(problem, 0, 0, "first look at the model"):
        return problem.random


@contextmanager
def model_randomness(problem: Problem, seed: int) -> Iterator[None]:
    """Let the model's own randomness (dropout) follow from the seed, and disturb nobody else's."""
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
    if not loss.requires_grad:
        raise FedShuffleError("the loss does not depend on the model it is given.")
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    if all(grad is not None for grad in found):
        return found
    if all(grad is None for grad in found):
        raise FedShuffleError("the loss does not depend on the model it is given.")
    pairs = zip(found, parameters, strict=True)
    return tuple(torch.zeros_like(p) if g is None else g for g, p in pairs)


def counted(weights: Sequence[float] | FloatArray) -> list[tuple[int, float]]:
    """In which of the sums something counts, and by what: often in one of very many.

    >>> counted([0.0, 0.5, 0.0, 2.0])
    [(1, 0.5), (3, 2.0)]
    """
    row = np.asarray(weights)
    places = np.flatnonzero(row)
    return list(zip(places.tolist(), row[places].tolist(), strict=True))


def largest_batch(walk: Walk) -> int:
    """The most examples in one minibatch."""
    return max((order.minibatches.batch_size for order in walk.orders), default=1)


def not_finite(problem: Problem, order: Order) -> DivergedError:
    """The error for an update with NaN or infinity."""
    batches = order.minibatches
    return DivergedError(
        f"the update is not finite after {batches.steps} steps of size {order.step_size:g}."
        " The step size is probably too large: lower it.",
        client=problem.federation.ids[batches.client],
        round=batches.round,
        stage="local training",
    )


def decayed(probe: Probe, gradients: Tensor) -> Tensor:
    """The gradients of a probe, with the weight decay that it asks for added in place."""
    if probe.weight_decay:
        decay = gradients.new_tensor(probe.weight_decay * probe.weights.sum(axis=0))
        gradients.addcmul_(decay.view(-1, 1, 1), torch.stack(list(probe.points)))
    return gradients


def check_probe(problem: Problem, probe: Probe, gradients: Tensor) -> Tensor:
    """Add weight decay to the gradients of a probe; an error where they are not finite."""
    gradients = decayed(probe, gradients)
    if not torch.isfinite(gradients).all():
        raise DivergedError(
            "the full gradient is not finite. The model has diverged: lower the step size.",
            client=f"among {len(probe.clients)} of the cohort",
            round=probe.round,
            stage="probe",
        )
    return gradients
