"""A request of a method, as messages to clients and their replies."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor

from fedshuffle._arrays import IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import protocol
from fedshuffle.flower.update_buffer import UpdateBuffer
from fedshuffle.kernel import ClientTask, FullGradient, LocalTraining, Request
from fedshuffle.training.rounds import Run

MAX_NORM = 1e18
"""Larger updates and gradients are refused: their squares overflow float32."""


class PendingRequest:
    """One exchange with the cohort: the messages to send, and the replies received so far."""

    def __init__(self, run: Run, round: int, request: Request, withheld: bool) -> None:
        self.run = run
        self.round = round
        self.request = request
        self.withheld = withheld
        self.group = str(round + 1)
        """Flower's group id of the round's messages; a reply must carry it."""
        self.norms: dict[int, float] = {}
        """The norm of what each client sent."""
        self._steps: dict[int, int] = {}
        self._last: tuple[tuple[Tensor | None, ...], ArrayRecord] | None = None
        if isinstance(request, LocalTraining):
            self._tasks = {task.minibatches.client: task for task in request.tasks}
            self.clients = list(self._tasks)
            self.buffer = UpdateBuffer(tuple(request.start.shape), request.start.dtype)
        else:
            self.clients = request.clients.tolist()
            points = torch.stack(list(request.points))
            self._points = protocol.arrays(points=points)
            self.buffer = UpdateBuffer(tuple(points.shape), points.dtype)

    @property
    def steps(self) -> IntArray | None:
        """Steps done per client (1 for those that have not replied); None for full gradients."""
        if isinstance(self.request, FullGradient):
            return None
        return np.array([self._steps.get(client, 1) for client in self.clients], dtype=np.int64)

    def write(self, client: int, node: int, ttl: float) -> Message:
        """The message to a client at a node."""
        if isinstance(self.request, FullGradient):
            content = protocol.content(protocol.Query(client, self.round), self._points)
            return Message(content, node, protocol.FULL_GRADIENT, ttl=ttl, group_id=self.group)
        task = self._tasks[client]
        content = protocol.content(self._instructions(task), self._arrays(self.request.start, task))
        return Message(content, node, protocol.TRAIN, ttl=ttl, group_id=self.group)

    def read(self, client: int, reply: Message) -> tuple[int, Tensor]:
        """The steps done and the array of a reply, if it is valid."""
        done = protocol.read(reply, protocol.Reply)
        if done.client != client:
            raise FedShuffleError(f"client {done.client} replied for client {client}.")
        trained = isinstance(self.request, LocalTraining)
        name = "update" if trained else "gradients"
        values = protocol.vectors(reply, self.buffer.dtype, name, **{name: self.buffer.shape})[name]
        if trained:
            planned = self._tasks[client].minibatches.steps
            if not 1 <= done.steps <= planned:
                raise FedShuffleError(f"it says that it did {done.steps} of {planned} steps.")
        self.norms[client] = norm = float(values.double().norm())
        if norm > MAX_NORM:
            raise FedShuffleError(
                f"its {name} is too large (norm {norm:.0e}). The step size is probably too large:"
                " lower it."
            )
        return done.steps, values

    def store(self, client: int, reply: tuple[int, Tensor]) -> None:
        """Store a reply."""
        self._steps[client], values = reply
        self.buffer.put(client, values)

    def _instructions(self, task: ClientTask) -> protocol.TrainRequest:
        minibatches, step = task.minibatches, task.coefficients
        return protocol.TrainRequest(
            client=minibatches.client,
            round=minibatches.round,
            seed=str(minibatches.seed),
            steps=minibatches.steps,
            batch_size=self.run.workload.batch_size,
            order=minibatches.order,
            step_size=float(task.step_size),
            alpha=float(step.alpha),
            beta=float(step.beta),
            mu=float(step.mu),
            clip=float(task.clip),
            weight_decay=float(task.weight_decay),
            size=None if self.withheld else minibatches.size,
        )

    def _arrays(self, x: Tensor, task: ClientTask) -> ArrayRecord:
        """The arrays of a task, encoded once for all clients that get the same."""
        given = (x, task.coefficients.v, task.coefficients.scale)
        if self._last is None or any(a is not b for a, b in zip(self._last[0], given)):
            x, v, scale = given
            self._last = given, protocol.arrays(x=x, v=v, scale=scale)
        return self._last[1]
