"""A request of a method as messages to clients, and their answers as they come."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor

from fedshuffle._arrays import IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import messages
from fedshuffle.flower.spool import Spool
from fedshuffle.kernel import Order, Probe, Request, Walk
from fedshuffle.rounds import Run

LONGEST = 1e18
"""Updates and gradients with a larger norm are refused: their squares do not fit into float32."""


@final
class Asking:
    """One exchange: everybody who is asked, what each is told, and what came back so far.

    Args:
        run: the settings.
        round: the number of the round.
        request: what the method asks for.
        withheld: whether clients keep their sizes to themselves.
    """

    def __init__(self, run: Run, round: int, request: Request, withheld: bool) -> None:
        self.run = run
        self.round = round
        self.request = request
        self.withheld = withheld
        self.group = str(round + 1)
        """By what an answer is known to be one to this round."""
        self.lengths: dict[int, float] = {}
        """The Euclidean norm of what each client sent."""
        self._steps: dict[int, int] = {}
        self._last: tuple[tuple[Tensor | None, ...], ArrayRecord] | None = None
        if isinstance(request, Walk):
            self._orders = {order.minibatches.client: order for order in request.orders}
            self.clients = list(self._orders)
            self.spool = Spool(tuple(request.start.shape), request.start.dtype)
        else:
            self.clients = request.clients.tolist()
            points = torch.stack(list(request.points))
            self._points = messages.arrays(points=points)
            self.spool = Spool(tuple(points.shape), points.dtype)

    @property
    def steps(self) -> IntArray | None:
        """The steps that each of the clients did, 1 for those who have not answered; None if
        nobody walked.
        """
        if isinstance(self.request, Probe):
            return None
        return np.array([self._steps.get(client, 1) for client in self.clients], dtype=np.int64)

    def write(self, client: int, node: int, ttl: float) -> Message:
        """The message to a client at a node."""
        if isinstance(self.request, Probe):
            question = messages.Question(client, self.round)
            content = messages.content(question, self._points)
            return Message(content, node, messages.PROBE, ttl=ttl, group_id=self.group)
        order = self._orders[client]
        content = messages.content(self._task(order), self._arrays(self.request.start, order))
        return Message(content, node, messages.WALK, ttl=ttl, group_id=self.group)

    def read(self, client: int, reply: Message) -> tuple[int, Tensor]:
        """The steps done and the array of an answer; one that cannot be right is refused."""
        done = messages.read(reply, messages.Done)
        if done.client != client:
            raise FedShuffleError(f"client {done.client} answered for client {client}.")
        walked = isinstance(self.request, Walk)
        name = "update" if walked else "gradients"
        found = messages.vectors(reply, self.spool.dtype, **{name: self.spool.shape})
        if name not in found:
            raise FedShuffleError(f"the answer lacks the array {name!r}.")
        if walked:
            planned = self._orders[client].minibatches.steps
            if not 1 <= done.steps <= planned:
                raise FedShuffleError(f"it says that it did {done.steps} of {planned} steps.")
        self.lengths[client] = length = float(found[name].double().norm())
        if length > LONGEST:
            raise FedShuffleError(
                f"its {name} is too long ({length:.0e}): no training gives that. The step size is"
                " probably too large: lower it."
            )
        return done.steps, found[name]

    def keep(self, client: int, answer: tuple[int, Tensor]) -> None:
        """Put an answer aside."""
        self._steps[client], values = answer
        self.spool.put(client, values)

    def _task(self, order: Order) -> messages.Task:
        minibatches, steering, work = order.minibatches, order.steering, self.run.workload.work
        return messages.Task(
            client=minibatches.client,
            round=minibatches.round,
            seed=str(minibatches.seed),
            steps=minibatches.steps,
            batch_size=work.batch_size,
            order=minibatches.order,
            step_size=order.step_size,
            alpha=float(steering.alpha),
            beta=float(steering.beta),
            mu=float(steering.mu),
            clip=float(order.clip),
            weight_decay=float(order.weight_decay),
            size=None if self.withheld else minibatches.size,
        )

    def _arrays(self, x: Tensor, order: Order) -> ArrayRecord:
        """The arrays of an order, made once for all who get the same."""
        given = (x, order.steering.v, order.steering.scale)
        if self._last is None or any(a is not b for a, b in zip(self._last[0], given)):
            x, v, scale = given
            self._last = given, messages.arrays(x=x, v=v, scale=scale)
        return self._last[1]
