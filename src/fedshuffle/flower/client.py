"""The client's side: a site that replies to the server with its own model and data."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedshuffle import fingerprint
from fedshuffle._arrays import number as number_in
from fedshuffle._sources import ExampleTransform
from fedshuffle.engines import Loss, Problem
from fedshuffle.engines.sequential import SequentialEngine
from fedshuffle.errors import FedShuffleError
from fedshuffle.evaluation import Evaluation
from fedshuffle.evaluation.evaluation import evaluation_mode
from fedshuffle.federation import Federation
from fedshuffle.flower import protocol
from fedshuffle.flower import secure_aggregation as secure
from fedshuffle.flower.chain import WireChain
from fedshuffle.flower.client_memory import ClientMemory
from fedshuffle.kernel import ClientTask, FullGradient, StepCoefficients
from fedshuffle.local_optimisers import LocalOptimiser
from fedshuffle.local_work import LocalWork, Minibatches

Data = Any
"""A client's examples: arrays or tensors with a row per example, or a map-style torch dataset."""
_OBSERVED = ("train_loss", "update_norm")  # metrics that are not those of a transform
_Request = TypeVar("_Request", protocol.TrainRequest, protocol.Query)


class Client:
    """One client: its number, its model and its data. Handles every message of the strategy.

    Args:
        number: its number among all clients, from 0 on; the strategy samples by it.
        model: any module. What it trains is overwritten by the server's values; the rest must have
            them already.
        data: its examples, a tuple of arrays or tensors with a row each, or a torch dataset.
        loss: ``loss(model, *fields)``, the mean over a minibatch.
        transform: what every minibatch passes through in training, such as augmentation (see
            :meth:`fedshuffle.Federation.with_transform`); its draws are those of a simulation.
        test: held-out examples for evaluation; the training data if there are none.
        metrics: what an evaluation reports.
        share_size: whether the server may know how many examples there are. If not, it cannot
            plan steps: it gives a step size for an epoch, which the client divides among its own.
        seconds: time limit for local work; at least one step is done. The server learns the steps
            really done, and methods such as fedshuffle-gen correct for the rest.
        secure_aggregation: whether updates are sent only with secure aggregation. A ``ClientApp``
            of your own then needs :data:`fedshuffle.flower.secure_aggregation.MODS`.
    """

    def __init__(
        self,
        number: int,
        model: nn.Module,
        data: Data,
        loss: Loss,
        *,
        transform: ExampleTransform | None = None,
        test: Data | None = None,
        metrics: tuple[str, ...] = ("loss", "accuracy"),
        share_size: bool = True,
        seconds: float | None = None,
        secure_aggregation: bool = False,
    ) -> None:
        if secure_aggregation and seconds is not None:
            raise FedShuffleError(
                "with secure aggregation clients finish their steps, since the server cannot"
                " correct one of them for the rest: leave seconds out."
            )
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
            raise FedShuffleError(f"the number of a client is {number!r}: use 0, 1, 2, ...")
        self.number = int(number)
        self.problem = Problem(model, loss, _alone(data).with_transform(transform))
        self.size = int(self.problem.federation.sizes[0])
        self.share_size = share_size
        self.seconds = None if seconds is None else number_in(seconds, "seconds", "(0, inf]")
        self.secure_aggregation = secure_aggregation
        self._test, self._metrics = test, metrics

    def handle(self, message: Message, context: Context | None = None) -> Message:
        """The reply to any message of the strategy. Transforms with state, such as error feedback,
        keep it in Flower's context.
        """
        kind = message.metadata.message_type
        handlers = {
            protocol.INFO: self._info,
            protocol.TRAIN: self._train,
            protocol.FULL_GRADIENT: self._full_gradient,
            protocol.EVALUATE: self._evaluate,
        }
        if kind not in handlers:
            raise FedShuffleError(f"fedshuffle has no messages of type {kind!r}.")
        return Message(handlers[kind](message, context), reply_to=message)

    def _info(self, message: Message, context: Context | None) -> RecordDict:
        mine, model = self.problem.parameters, self.problem.model
        first = {id(p): name for name, p in mine.items()}
        every = dict(model.named_parameters(remove_duplicate=False))
        tied = {k: first[id(p)] for k, p in every.items() if id(p) in first and k not in mine}
        rest = every | dict(model.named_buffers(remove_duplicate=False))
        info = protocol.ClientInfo(
            self.number,
            {name: list(p.shape) for name, p in mine.items()},
            str(self.problem.dtype).removeprefix("torch."),
            {k: fingerprint.tensor(p) for k, p in rest.items() if k not in {*mine, *tied}},
            tied,
            self.size if self.share_size else None,
            self.secure_aggregation,
        )
        return protocol.content(info)

    def _train(self, message: Message, context: Context | None) -> RecordDict:
        d = len(self.problem.start)
        request, sent = self._read(message, protocol.TrainRequest, x=[d], v=[d], scale=[d])
        task, clock = self._task(request, sent)
        planned, x, engine = task.minibatches.steps, sent["x"], SequentialEngine(self.problem)
        wire, memory = WireChain.from_texts(request.chain), ClientMemory(context, self.number)
        state = memory.read(request.state_after, x) if wire.chain.keeps_state else None
        shared = {k: torch.from_numpy(a) for k, a in protocol.raw(message, protocol.SHARED).items()}
        out = wire.run(engine, x, task, shared, state)
        done, values, metrics = clock.steps if self.seconds else planned, out.values, out.metrics
        if request.size is None:  # the server cannot correct for steps that it does not know
            if wire.chain and done < planned:
                raise FedShuffleError(
                    f"client {self.number} did not finish its steps, and what it sends cannot be"
                    " corrected after transforms. Leave seconds out, or share its size."
                )
            values, done = values * (planned / done), request.steps
        if request.clipping_range is not None:
            values = secure.weighted(values, request.weight, request.clipping_range)
            metrics = {k: v for k, v in metrics.items() if k not in _OBSERVED}  # nobody masks them
        reply = protocol.Reply(self.number, done, metrics)
        if state is not None and out.state is not None and request.state_after is not None:
            memory.write({request.state_after: state, request.round + 1: out.state})
        if out.encoded is not None:
            return protocol.content(reply, message=protocol.raw_arrays(out.encoded))
        gradient = engine.own_gradients(x, [task])[0] if request.send_gradient else None
        return protocol.content(reply, protocol.arrays(update=values, gradient=gradient))

    def _task(
        self, request: protocol.TrainRequest, sent: Mapping[str, Tensor]
    ) -> "tuple[ClientTask, _Clock]":
        """What to do, and a clock that counts the steps done if time is limited."""
        steps, step_size = self._plan(request)
        clock = _Clock(self.seconds or 0.0)
        minibatches = Minibatches(
            client=0,
            size=self.size,
            steps=steps,
            batch_size=min(request.batch_size, self.size),
            order=LocalWork(order=request.order).order,  # type: ignore[arg-type]  # it checks
            seed=int(request.seed),
            round=request.round,
            stream_id=request.client,
            should_stop=clock.out_of_time if self.seconds else None,
        )
        step = StepCoefficients(
            request.alpha,
            request.beta,
            request.mu,
            sent.get("v"),
            sent.get("scale"),
            request.own_gradient,
        )
        # Transforms see the aggregation weight; the second sum is what the client sends.
        weights = [request.weight, 1.0]
        optimiser = LocalOptimiser.read(request.optimiser)
        task = ClientTask(
            minibatches,
            step_size,
            step,
            weights,
            request.clip,
            request.weight_decay,
            None if optimiser.plain else optimiser,
        )
        return task, clock

    def _plan(self, request: protocol.TrainRequest) -> tuple[int, float]:
        """The number of steps and their size."""
        if request.size is None:
            per_epoch = -(-self.size // min(request.batch_size, self.size))
            return request.steps * per_epoch, request.step_size / per_epoch
        if not self.share_size:  # the next error would reveal it
            raise protocol.withheld(self.number)
        if request.size != self.size:
            raise FedShuffleError(
                f"client {self.number} has {self.size} examples, but the server planned for"
                f" {request.size}. Data must stay the same during a run: start a new run."
            )
        return request.steps, request.step_size

    def _full_gradient(self, message: Message, context: Context | None) -> RecordDict:
        d = len(self.problem.start)
        query, sent = self._read(message, protocol.Query, points=[-1, d])
        points = list(sent["points"])
        request = FullGradient(
            points,
            np.zeros(1, np.int64),
            np.ones((1, 1)),
            query.round,
            seed=int(query.seed),
            stream_id=query.client,
        )
        (gradients,) = SequentialEngine(self.problem).full_gradients([request])[0].sums
        return self._reply(gradients=gradients)

    def _evaluate(self, message: Message, context: Context | None) -> RecordDict:
        _, sent = self._read(message, protocol.Query, x=[len(self.problem.start)])
        data = self.problem.federation if self._test is None else _alone(self._test)
        evaluation = Evaluation(data, self._metrics, loss=self.problem.loss, per_client=False)
        model = self.problem.load(sent["x"])
        with evaluation_mode(model):
            found = evaluation(model)
        record = self._reply()
        record["metrics"] = MetricRecord({name: float(value) for name, value in found.items()})
        return record

    def _read(
        self, message: Message, kind: type[_Request], **shapes: Sequence[int]
    ) -> tuple[_Request, dict[str, Tensor]]:
        """The fields and arrays of a message to this client; the first array is required."""
        fields = protocol.read(message, kind)
        if fields.client != self.number:
            raise FedShuffleError(
                f"the message is for client {fields.client}, and this is client {self.number}."
            )
        sent = protocol.vectors(message, self.problem.dtype, **shapes)
        return fields, {name: values.to(self.problem.device) for name, values in sent.items()}

    def _reply(self, steps: int = 0, **arrays: Tensor) -> RecordDict:
        return protocol.content(protocol.Reply(self.number, steps), protocol.arrays(**arrays))


class _Clock:
    """Counts steps until time is up."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.steps = 0

    def out_of_time(self) -> bool:
        """Whether the next step is one too many; the first is always done."""
        if self.steps and time.monotonic() >= self._end:
            return True
        self.steps += 1
        return False


def client_app(
    model: Callable[[], nn.Module],
    data: Callable[[Context], Data],
    loss: Loss,
    *,
    transform: ExampleTransform | None = None,
    test: Callable[[Context], Data] | None = None,
    metrics: tuple[str, ...] = ("loss", "accuracy"),
    share_size: bool = True,
    seconds: float | None = None,
    secure_aggregation: bool = False,
    number: Callable[[Context], int] | None = None,
) -> ClientApp:
    """A ready ``ClientApp`` for :class:`~fedshuffle.flower.FedShuffleStrategy`.

    Args:
        model, data, test: functions that give what :class:`Client` takes; the last two know the
            node by Flower's context.
        loss, transform, metrics, share_size, seconds, secure_aggregation: as for :class:`Client`.
        number: the client's number; ``partition-id`` of the node's config by default.

    >>> import torch
    >>> from fedshuffle import losses
    >>> app = client_app(
    ...     model=lambda: torch.nn.Linear(2, 2),
    ...     data=lambda context: (torch.eye(2), torch.arange(2)),
    ...     loss=losses.cross_entropy,
    ... )
    """
    app = ClientApp(mods=[*secure.MODS] if secure_aggregation else [])

    def handle(message: Message, context: Context) -> Message:
        client = Client(
            _partition(context) if number is None else number(context),
            model(),
            data(context),
            loss,
            transform=transform,
            test=None if test is None else test(context),
            metrics=metrics,
            share_size=share_size,
            seconds=seconds,
            secure_aggregation=secure_aggregation,
        )
        return client.handle(message, context)

    app.query("info")(handle)
    app.train()(handle)
    app.train("full_gradient")(handle)
    app.evaluate()(handle)
    return app


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
