"""The client's side: a site that answers the server's messages with its own model and data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedshuffle import _identity
from fedshuffle._arrays import number
from fedshuffle.engines import Loss, Problem
from fedshuffle.engines.lean import LeanEngine
from fedshuffle.errors import FedShuffleError
from fedshuffle.evaluation import Evaluation
from fedshuffle.evaluation.evaluation import evaluating
from fedshuffle.federation import Federation
from fedshuffle.flower import messages
from fedshuffle.kernel import Order, Probe, Steering, Walk
from fedshuffle.local_work import LocalWork, Minibatches

Data = Any
"""A client's examples: arrays or tensors with a row per example, or a map-style torch dataset."""


@final
class Client:
    """One client: its number, its model and its data. Answers every message of the strategy.

    Args:
        number: its number among all clients, from 0 on; the strategy samples by it.
        model: any module. What it trains is overwritten by the server's values; the rest must have
            them already.
        data: its examples, a tuple of arrays or tensors with a row each, or a torch dataset.
        loss: ``loss(model, *fields)``, the mean over a minibatch.
        test: held-out examples for evaluation; the training data if there are none.
        metrics: what an evaluation reports.
        share_size: whether the server may know how many examples there are. If not, it cannot
            plan steps: it gives a step size for an epoch, which the client divides among its own.
        seconds: stop after so much local work, with at least one step done; None for no limit.
            The server is told the steps really done, and methods such as fedshuffle-gen make up
            for the rest.
    """

    def __init__(
        self,
        number: int,
        model: nn.Module,
        data: Data,
        loss: Loss,
        *,
        test: Data | None = None,
        metrics: tuple[str, ...] = ("loss", "accuracy"),
        share_size: bool = True,
        seconds: float | None = None,
    ) -> None:
        self.number = _number(number)
        self.problem = Problem(model, loss, _alone(data))
        self.share_size = share_size
        self.seconds = _limit(seconds)
        self._test, self._metrics = test, metrics

    @property
    def size(self) -> int:
        """How many examples it has."""
        return int(self.problem.federation.sizes[0])

    def answer(self, message: Message) -> Message:
        """The reply to any message of the strategy."""
        kind = message.metadata.message_type
        answers = {
            messages.HELLO: self._hello,
            messages.WALK: self._walk,
            messages.PROBE: self._probe,
            messages.EVALUATE: self._evaluate,
        }
        if kind not in answers:
            raise FedShuffleError(f"no message of fedshuffle is of type {kind!r}.")
        return Message(answers[kind](message), reply_to=message)

    def _hello(self, message: Message) -> RecordDict:
        mine, model = self.problem.parameters, self.problem.model
        first = {id(p): name for name, p in mine.items()}
        every = dict(model.named_parameters(remove_duplicate=False))
        tied = {k: first[id(p)] for k, p in every.items() if id(p) in first and k not in mine}
        rest = every | dict(model.named_buffers(remove_duplicate=False))
        return messages.content(
            messages.Hello(
                self.number,
                {name: list(p.shape) for name, p in mine.items()},
                str(self.problem.dtype).removeprefix("torch."),
                {k: _identity.tensor(p) for k, p in rest.items() if k not in {*mine, *tied}},
                tied,
                self.size if self.share_size else None,
            )
        )

    def _walk(self, message: Message) -> RecordDict:
        task = messages.read(message, messages.Task)
        self._expect(task.client)
        d = len(self.problem.start)
        sent = self._arrays(message, x=[d], v=[d], scale=[d])
        if "x" not in sent:
            raise FedShuffleError("the message lacks the model x.")
        planned, step_size = self._plan(task)
        clock = _Clock(self.seconds)
        minibatches = Minibatches(
            client=0,
            size=self.size,
            steps=planned,
            batch_size=min(task.batch_size, self.size),
            order=LocalWork(order=task.order).order,  # type: ignore[arg-type]  # it checks
            seed=int(task.seed),
            round=task.round,
            known_as=task.client,
            enough=clock.enough if self.seconds else None,
        )
        steering = Steering(task.alpha, task.beta, task.mu, sent.get("v"), sent.get("scale"))
        order = Order(minibatches, step_size, steering, [1.0], task.clip, task.weight_decay)
        (update,) = LeanEngine(self.problem).walk([Walk(sent["x"], [order], 1)])[0]
        done = clock.steps if self.seconds else planned
        if task.size is None:  # nobody else can repair what nobody else knows
            update, done = update * (planned / done), task.steps
        return messages.content(messages.Done(self.number, done), messages.arrays(update=update))

    def _plan(self, task: messages.Task) -> tuple[int, float]:
        """The steps to do, and how long each is."""
        if task.size is None:
            per_epoch = -(-self.size // min(task.batch_size, self.size))
            return task.steps * per_epoch, task.step_size / per_epoch
        if not self.share_size:  # nor may it be guessed
            raise FedShuffleError(
                f"client {self.number} withholds its size. Let it share it (share_size=True), or"
                ' give the strategy sizes="withheld".'
            )
        if task.size != self.size:
            raise FedShuffleError(
                f"client {self.number} has {self.size} examples, but the server planned for"
                f" {task.size}. Data must stay the same during a run: begin anew."
            )
        return task.steps, task.step_size

    def _probe(self, message: Message) -> RecordDict:
        question = messages.read(message, messages.Question)
        self._expect(question.client)
        points = self._arrays(message, points=[-1, len(self.problem.start)]).get("points")
        if points is None:
            raise FedShuffleError("the message lacks the points of the probe.")
        probe = Probe(list(points), np.zeros(1, np.int64), np.ones((1, 1)), question.round)
        (gradients,) = LeanEngine(self.problem).probe([probe])[0]
        return messages.content(messages.Done(self.number, 0), messages.arrays(gradients=gradients))

    def _evaluate(self, message: Message) -> RecordDict:
        self._expect(messages.read(message, messages.Question).client)
        x = self._arrays(message, x=[len(self.problem.start)]).get("x")
        if x is None:
            raise FedShuffleError("the message lacks the model x.")
        data = self.problem.federation if self._test is None else _alone(self._test)
        evaluation = Evaluation(data, self._metrics, loss=self.problem.loss, per_client=False)
        model = self.problem.load(x)
        with evaluating(model):
            found = evaluation(model)
        record = messages.content(messages.Done(self.number, 0))
        record["metrics"] = MetricRecord({name: float(value) for name, value in found.items()})
        return record

    def _arrays(self, message: Message, **shapes: Sequence[int]) -> dict[str, Tensor]:
        """The arrays of a message, where the model is."""
        sent = messages.vectors(message, self.problem.dtype, **shapes)
        return {name: values.to(self.problem.device) for name, values in sent.items()}

    def _expect(self, client: int) -> None:
        if client != self.number:
            raise FedShuffleError(
                f"the message is for client {client}, and this is client {self.number}."
            )


def client_app(
    model: Callable[[], nn.Module],
    data: Callable[[Context], Data],
    loss: Loss,
    *,
    test: Callable[[Context], Data] | None = None,
    metrics: tuple[str, ...] = ("loss", "accuracy"),
    share_size: bool = True,
    seconds: float | None = None,
    number: Callable[[Context], int] | None = None,
) -> ClientApp:
    """A ready ``ClientApp`` for :class:`~fedshuffle.flower.FedShuffleStrategy`.

    Args:
        model: makes the model. What it trains is overwritten by the server's values; the rest
            (frozen parameters, buffers) must have them already.
        data: gives this client's examples: a tuple of arrays or tensors, or a torch dataset.
        loss: ``loss(model, *fields)``, the mean over a minibatch.
        test: gives held-out examples for evaluation.
        metrics: what an evaluation reports.
        share_size: as for :class:`Client`.
        seconds: as for :class:`Client`.
        number: the client's number; ``partition-id`` of the node's config by default.

    >>> import torch
    >>> from fedshuffle import losses
    >>> app = client_app(
    ...     model=lambda: torch.nn.Linear(2, 2),
    ...     data=lambda context: (torch.eye(2), torch.arange(2)),
    ...     loss=losses.cross_entropy,
    ... )
    """
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        client = Client(
            _partition(context) if number is None else number(context),
            model(),
            data(context),
            loss,
            test=None if test is None else test(context),
            metrics=metrics,
            share_size=share_size,
            seconds=seconds,
        )
        return client.answer(message)

    app.query("hello")(answer)
    app.train()(answer)
    app.train("probe")(answer)
    app.evaluate()(answer)
    return app


class _Clock:
    """Counts steps, and says when time is up; the first step is always done."""

    def __init__(self, seconds: float | None) -> None:
        self.steps = 0
        self._end = time.monotonic() + (seconds or 0.0)

    def enough(self) -> bool:
        if self.steps and time.monotonic() >= self._end:
            return True
        self.steps += 1
        return False


def _alone(data: Data) -> Federation:
    """The federation of one client."""
    if isinstance(data, Federation):
        raise FedShuffleError("a client's data are its own examples, not a federation.")
    if isinstance(data, Dataset):
        return Federation.from_datasets([data])
    fields = data if isinstance(data, tuple | list) else (data,)
    if not fields:
        raise FedShuffleError("a client's data are arrays with a row per example: give at least 1.")
    return Federation.from_arrays(*fields, sizes=[len(fields[0])])


def _partition(context: Context) -> int:
    try:
        return int(context.node_config["partition-id"])
    except (KeyError, TypeError, ValueError):
        raise FedShuffleError(
            "the node does not say which client it is. Start it with"
            ' --node-config "partition-id=0 num-partitions=3", or give client_app(number=...).'
        ) from None


def _number(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise FedShuffleError(f"the number of a client is {value!r}: use 0, 1, 2, ...")
    return int(value)


def _limit(seconds: float | None) -> float | None:
    if seconds is not None and not number(seconds, "seconds") > 0:
        raise FedShuffleError(f"seconds is {seconds}, but must be positive, or None for no limit.")
    return seconds
