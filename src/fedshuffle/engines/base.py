"""What an engine is: it answers the requests of methods, and does not know the methods."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

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
from fedshuffle.kernel import ClientTask, FullGradient, LocalTraining


class Engine(Protocol):
    """Answers many requests at once, so that runs in lockstep can share the work."""

    name: str
    """The name by which :func:`fedshuffle.engines.make` makes the same engine; runs record it."""
    problem: Problem

    def local_training(self, requests: Sequence[LocalTraining]) -> list[Tensor]:
        """For every request the weighted sums of the updates, one row per sum."""

    def full_gradients(self, requests: Sequence[FullGradient]) -> list[Tensor]:
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


class Stopped(BaseException):
    """Another worker failed or was interrupted, so this result is no longer needed."""


def client_context(
    problem: Problem, client: int, round: int, stage: str
) -> AbstractContextManager[None]:
    """Add the client, the round and the stage to what the user's model or loss raises."""
    return error_context(
        lambda error: TrainingError(
            user_error(error), client=problem.federation.ids[client], round=round, stage=stage
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
        raise FedShuffleError("the loss does not depend on the model it is given.")
    pairs = zip(found, parameters, strict=True)
    return tuple(torch.zeros_like(p) if g is None else g for g, p in pairs)


def nonzero_weights(weights: Sequence[float] | FloatArray) -> list[tuple[int, float]]:
    """The sums to which a client contributes, often one of very many, and its weight in each.

    >>> nonzero_weights([0.0, 0.5, 0.0, 2.0])
    [(1, 0.5), (3, 2.0)]
    """
    row = np.asarray(weights)
    places = np.flatnonzero(row)
    return list(zip(places.tolist(), row[places].tolist(), strict=True))


def not_finite(problem: Problem, task: ClientTask) -> DivergedError:
    """The error for an update with NaN or infinity."""
    batches = task.minibatches
    return DivergedError(
        f"the update is not finite after {batches.steps} steps of size {task.step_size:g}."
        " The step size is probably too large: lower it.",
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


def finished_gradients(request: FullGradient, gradients: Tensor) -> Tensor:
    """Full gradients with weight decay added; an error where they are not finite."""
    gradients = add_weight_decay(request, gradients)
    if not torch.isfinite(gradients).all():
        raise DivergedError(
            "the full gradient is not finite. The model has diverged: lower the step size.",
            client=f"among {len(request.clients)} of the cohort",
            round=request.round,
            stage="full gradient",
        )
    return gradients
