"""What clients are asked, and the checks of their replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import protocol
from fedshuffle.flower.transport import Exchange
from fedshuffle.flower.update_buffer import Update, UpdateBuffer
from fedshuffle.kernel import FullGradient, LocalTraining

MAX_NORM = 1e18
"""Larger updates and gradients are refused: their squares overflow float32."""


def local_training(
    request: LocalTraining, round: int, batch_size: int, withheld: bool
) -> Exchange[UpdateBuffer]:
    """Local training; ``withheld`` says whether clients withhold their sizes."""
    tasks = {task.minibatches.client: task for task in request.tasks}
    encode = lru_cache(1)(protocol.arrays)  # once for all clients that get the same

    def write(client: int) -> RecordDict:
        task = tasks[client]
        minibatches, step = task.minibatches, task.coefficients
        fields = protocol.TrainRequest(
            client=client,
            round=round,
            seed=str(minibatches.seed),
            steps=minibatches.steps,
            batch_size=batch_size,
            order=minibatches.order,
            step_size=float(task.step_size),
            alpha=float(step.alpha),
            beta=float(step.beta),
            mu=float(step.mu),
            clip=float(task.clip),
            weight_decay=float(task.weight_decay),
            size=None if withheld else minibatches.size,
        )
        return protocol.content(fields, encode(x=request.start, v=step.v, scale=step.scale))

    def read(client: int, steps: int, reply: Message) -> Update:
        planned = tasks[client].minibatches.steps
        if not 1 <= steps <= planned:
            raise FedShuffleError(f"it says that it did {steps} of {planned} steps.")
        return _array(reply, "update", request.start), steps

    return Exchange(protocol.TRAIN, round, list(tasks), write, read, UpdateBuffer(request.start))


def full_gradients(request: FullGradient) -> Exchange[UpdateBuffer]:
    """Full gradients at some points."""
    points, round = torch.stack(list(request.points)), request.round

    def read(client: int, steps: int, reply: Message) -> Update:
        return _array(reply, "gradients", points), steps

    clients, write = request.clients.tolist(), _query(round, points=points)
    return Exchange(protocol.FULL_GRADIENT, round, clients, write, read, UpdateBuffer(points))


def evaluation(
    clients: Sequence[int], round: int, x: Tensor
) -> Exchange[dict[int, dict[str, float]]]:
    """The evaluation of a model by clients: their metrics."""

    def read(client: int, steps: int, reply: Message) -> dict[str, float]:
        records = list(reply.content.metric_records.values())
        numbers = dict(records[0]) if records else {}
        if not numbers or not all(isinstance(v, int | float) for v in numbers.values()):
            raise FedShuffleError("the reply has no metrics.")
        return {name: float(value) for name, value in numbers.items()}

    return Exchange(protocol.EVALUATE, round, clients, _query(round, x=x), read, {})


def _query(round: int, **arrays: Tensor) -> Callable[[int], RecordDict]:
    encoded = protocol.arrays(**arrays)
    return lambda client: protocol.content(protocol.Query(client, round), encoded)


def _array(reply: Message, name: str, like: Tensor) -> Tensor:
    values = protocol.vectors(reply, like.dtype, name, **{name: like.shape})[name]
    if (norm := float(values.double().norm())) > MAX_NORM:
        raise FedShuffleError(
            f"its {name} is too large (norm {norm:.0e}). The step size is probably too large:"
            " lower it."
        )
    return values
