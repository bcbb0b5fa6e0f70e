"""Other people's servers in the form that the black-box audit needs."""

import abc
import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.errors import FedShuffleError, error_context, optional_import, user_error
from fedshuffle.sampling import Sampling

__all__ = ["Aggregator", "FlowerAggregator", "FunctionAggregator", "Replies"]

_ASKED = 4  # a strategy that asks for the nodes more often in a round waits for more of them
_STEP_SIZE = "lr"  # the key by which Flower's apps send the clients' step size


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Replies:
    """What reaches the server in one round: an entry, or a row, per client in order of arrival."""

    round: int  # from 0 on
    clients: IntArray
    sizes: IntArray  # examples
    steps: IntArray  # local steps done
    probabilities: FloatArray  # inclusion probabilities
    updates: FloatArray  # how far each client would move the model: (clients, dimensions)


class Aggregator(abc.ABC):
    """A server under audit: it maps the replies of a round to a step of the model."""

    name: str
    resets: bool  # whether reset() clears all state; a plain function may have hidden state

    @abc.abstractmethod
    def reset(self) -> None:
        """Start again: before the first round, with a model of zero."""

    @abc.abstractmethod
    def step(self, replies: Replies) -> FloatArray:
        """How the model moves in this round: one number per dimension."""

    def average(self) -> "Aggregator | None":
        """The server without its optimiser; None if there is none, or it cannot be separated."""
        return None


def as_aggregator(given: Aggregator | Callable[..., Any]) -> Aggregator:
    """A server under audit, from an adapter or a function."""
    return given if isinstance(given, Aggregator) else FunctionAggregator(given)


def check_not_by_updates(sampling: Sampling) -> None:
    """Refuse a sampling that looks at the updates, which are those of the audit."""
    if sampling.two_phase:
        raise FedShuffleError(
            f"sampling {sampling!r} depends on the updates, and those of the audit are not real:"
            " give its pool, the clients that train."
        )


class FunctionAggregator(Aggregator):
    """``aggregate(clients, sizes, updates) -> step``, with ``updates`` a row per client.

    It may have further parameters named ``steps``, ``probabilities`` and ``round``. A server with
    memory is a class whose objects are called like that: a new object is a fresh server.

    >>> def mean(clients, sizes, updates):
    ...     return updates.mean(axis=0)
    >>> FunctionAggregator(mean).name
    'mean'
    """

    def __init__(self, aggregate: Callable[..., Any], name: str | None = None) -> None:
        if not callable(aggregate):
            raise FedShuffleError(
                f"{aggregate!r:.60} cannot be called: give a function of (clients, sizes, updates)"
                " that returns the server's step, or a class whose objects are such functions."
            )
        self.resets = isinstance(aggregate, type)
        self.name = name or getattr(aggregate, "__name__", None) or type(aggregate).__name__
        self._given = aggregate
        self.reset()

    def reset(self) -> None:
        self._call = self._given
        if self.resets:
            remedy = "Give a class that needs no arguments."
            self._call = _call(self._given, self.name, remedy)
        if not callable(self._call):
            raise FedShuffleError(
                f"objects of {self.name} cannot be called: give it a method"
                " __call__(self, clients, sizes, updates) that returns the server's step."
            )
        self._more: list[str] = []
        with contextlib.suppress(
            TypeError, ValueError
        ):  # some built-in functions have no signature
            optional = inspect.signature(self._call).parameters.keys()
            self._more = sorted(optional & {"steps", "probabilities", "round"})

    def step(self, replies: Replies) -> FloatArray:
        more = {name: getattr(replies, name) for name in self._more}
        step = self._call(replies.clients, replies.sizes, replies.updates, **more)
        if np.iscomplexobj(step):
            raise FedShuffleError(f"{self.name} gives complex numbers: give a step of real ones.")
        return np.asarray(step, dtype=np.float64)


class FlowerAggregator(Aggregator):
    """A strategy of Flower's message API, or what makes one when called without arguments.

    ``nodes`` is the number of clients of the federation, which the strategy sees as nodes. Clients
    reply with their model under the strategy's key, their numbers of examples and steps, and a loss
    of one. If the strategy changes their step size (``lr``), they use it; if it sends a clipping
    norm, they clip, as with Flower's own client modifiers.
    A round runs as in ``Strategy.start``, without a network. Which nodes the strategy would have
    picked is ignored: the audit's sampling decides who replies.
    """

    resets = True
    _averages = False  # whether to leave out the optimiser that follows the average

    def __init__(self, strategy: Any, nodes: int, name: str | None = None) -> None:
        self._flwr = _flower("app")
        ensure_identity()
        is_strategy = hasattr(strategy, "aggregate_train") and not isinstance(strategy, type)
        made = strategy
        if callable(strategy) and not is_strategy:
            given = getattr(strategy, "__name__", repr(strategy))
            remedy = "Give a strategy with its arguments, or a function that makes it without any."
            with _quiet():
                made = _call(strategy, given, remedy)
        if not hasattr(made, "aggregate_train") or not hasattr(made, "configure_train"):
            raise FedShuffleError(
                f"{made!r:.60} is not a strategy of Flower's message API: give one with"
                " configure_train and aggregate_train, as those of flwr.serverapp.strategy have, or"
                " what makes one when called without arguments."
            )
        self.name, self._pristine, self._nodes = name or type(made).__name__, made, nodes
        self.reset()

    def reset(self) -> None:
        self._strategy = copy.deepcopy(self._pristine)
        self._model: FloatArray | None = None

    def average(self) -> "FlowerAggregator | None":
        """The same without the server's optimiser, for FedAdagrad, FedAdam and FedYogi."""
        strategies = _flower("serverapp.strategy")
        adaptive = strategies.FedAdagrad, strategies.FedAdam, strategies.FedYogi
        if self._averages or not isinstance(self._pristine, adaptive):
            return None
        inner = copy.copy(self)
        inner._averages = True
        inner.reset()
        return inner

    def step(self, replies: Replies) -> FloatArray:
        app, strategy = self._flwr, self._strategy
        model = np.zeros(replies.updates.shape[1]) if self._model is None else self._model
        grid, round = _Grid(self._nodes), replies.round + 1
        with _quiet():
            config = app.ConfigRecord({_STEP_SIZE: 1.0})
            asked = list(strategy.configure_train(round, self._arrays(model), config, grid))
            step_sizes = {message.metadata.dst_node_id: _step_size(message) for message in asked}
            columns = replies.clients, replies.sizes, replies.steps
            answers = [
                self._reply(
                    client,
                    model,
                    step_sizes.get(client + 1, 1.0) * update,
                    {"num-examples": size, "num-steps": steps},
                    _clipping_norm(asked),
                )
                for (client, size, steps), update in zip(
                    zip(*(column.tolist() for column in columns), strict=True),
                    replies.updates,
                    strict=True,
                )
            ]
            aggregate = strategy.aggregate_train
            if self._averages:
                plain = _flower("serverapp.strategy").FedAvg.aggregate_train
                aggregate = functools.partial(plain, strategy)
            arrays, _ = aggregate(round, answers)
        if arrays is None:  # the strategy leaves the model as it is
            self._model = model
            return np.zeros_like(model)
        self._model = np.asarray(next(iter(arrays.values())).numpy(), dtype=np.float64)
        return self._model - model

    def _arrays(self, model: FloatArray) -> Any:
        return self._flwr.ArrayRecord({"x": self._flwr.Array(model.copy())})

    def _reply(
        self,
        client: int,
        model: FloatArray,
        update: FloatArray,
        counts: Mapping[str, float],
        clip: float | None,
    ) -> Any:
        app, more = self._flwr, {}
        if clip is not None:  # as fixedclipping_mod and adaptiveclipping_mod do
            kept = min(1.0, clip / max(float(np.linalg.norm(update)), 1e-300))
            update, more = kept * update, {"norm_bit": int(kept < 1)}
        keys = {"num-examples": "weighted_by_key", "num-steps": "steps_key"}
        numbers = {self._key(keys[name], name): value for name, value in counts.items()}
        numbers |= {self._key("train_loss_key", "train_loss"): 1.0, **more}
        key = self._key("arrayrecord_key", "arrays")
        arrays = self._arrays(model + update)
        content = app.RecordDict({key: arrays, "metrics": app.MetricRecord(numbers)})
        asked = app.Message(app.RecordDict({}), dst_node_id=client + 1, message_type="train")
        return app.Message(content, reply_to=asked)

    def _key(self, name: str, default: str) -> str:
        """A key of the strategy, or of the one that it wraps."""
        strategy: Any = self._strategy
        while strategy is not None:
            if hasattr(strategy, name):
                return str(getattr(strategy, name))
            strategy = getattr(strategy, "strategy", None)
        return default


def _step_size(message: Any) -> float:
    """The step size that the strategy tells a client, where it was given 1."""
    records = message.content.config_records.values()
    return next((float(record[_STEP_SIZE]) for record in records if _STEP_SIZE in record), 1.0)


def _clipping_norm(messages: list[Any]) -> float | None:
    """The norm to which the strategy asks clients to clip their updates, if it does."""
    records = [record for message in messages for record in message.content.config_records.values()]
    norms = [float(record["clipping_norm"]) for record in records if "clipping_norm" in record]
    return norms[0] if norms else None


class _Grid:
    """The nodes, as a strategy sees them."""

    def __init__(self, nodes: int) -> None:
        self._nodes, self._asked = nodes, 0

    def get_node_ids(self) -> list[int]:
        self._asked += 1
        if self._asked > _ASKED:
            raise FedShuffleError(
                f"the strategy waits for more than the {self._nodes} clients there are: lower its"
                " min_train_nodes and min_available_nodes, or give more clients."
            )
        return list(range(1, self._nodes + 1))


def _call(make: Callable[[], Any], name: str, remedy: str) -> Any:
    with error_context(lambda error: f"{name}() fails: {user_error(error)}. {remedy}"):
        return make()


def _flower(part: str) -> Any:
    return optional_import(f"flwr.{part}", "auditing a Flower strategy", "flower")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Flower's log, which has lines for every round."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def ensure_identity() -> None:
    """Set the ids that messages carry, unless this is one of Flower's processes, which has them.

    Messages of older versions of Flower need none.
    """
    try:
        identity = import_module("flwr.supercore.task_identity").TaskIdentity
    except ImportError:
        return
    for name in ("run_id", "node_id", "task_id"):
        try:
            getattr(identity, name)
        except RuntimeError:  # it is not set
            setattr(identity, name, 1)
