"""A strategy of Flower's message API (``flwr.serverapp.strategy``) as a server under audit.

A round is played as Flower's own ``Strategy.start`` does it: ``configure_train``, then
``aggregate_train`` with the clients' replies, but without a network. Which nodes the strategy would
have picked is ignored: the audit's sampling decides who replies. Flower's own ``fraction_train`` is
``uniform:B``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
from collections.abc import Iterator
from typing import Any, final

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.adapters.base import Aggregator, Replies
from fedshuffle.errors import FedShuffleError

_ASKED = 4
"""A strategy that asks for the nodes more often than this in one round waits for more of them."""


@final
class Flower(Aggregator):
    """A Flower strategy, or a class or function that makes one when called without arguments.

    ``nodes`` is how many nodes the strategy is shown: the clients of the federation. Clients reply
    with their model under the key of the strategy, the number of their examples, and a training
    loss of one.
    """

    resets = True
    _averages = False
    """Whether only the average is asked for, without the optimiser that follows it."""

    def __init__(self, strategy: Any, nodes: int, name: str | None = None) -> None:
        self._flwr = _flower("app")
        made = strategy
        if isinstance(strategy, type) or not hasattr(strategy, "aggregate_train"):
            made = _make(strategy)
        if not hasattr(made, "aggregate_train") or not hasattr(made, "configure_train"):
            raise FedShuffleError(
                f"{made!r:.60} is no strategy of Flower's message API: it needs configure_train and"
                " aggregate_train, as those of flwr.serverapp.strategy have."
            )
        self.name = name or type(made).__name__
        self._pristine = made
        self._nodes = nodes
        self.reset()

    def reset(self) -> None:
        self._strategy = copy.deepcopy(self._pristine)
        self._model: FloatArray | None = None

    def average(self) -> Flower | None:
        """The same without the server's optimiser, for FedAdam and its kin."""
        strategies = _flower("serverapp.strategy")
        kin = tuple(
            getattr(strategies, name)
            for name in ("FedAdagrad", "FedAdam", "FedYogi")
            if hasattr(strategies, name)
        )
        if self._averages or not isinstance(self._pristine, kin):
            return None
        inner = copy.copy(self)
        inner._averages = True
        inner.reset()
        return inner

    def step(self, replies: Replies) -> FloatArray:
        app, strategy = self._flwr, self._strategy
        model = np.zeros(replies.updates.shape[1]) if self._model is None else self._model
        grid = _Grid(self._nodes)
        with _quiet(), _identity():
            sent = strategy.configure_train(
                replies.round + 1, self._arrays(model), app.ConfigRecord({}), grid
            )
            list(sent)  # it may be a generator
            answers = [
                self._reply(client, model + update, size)
                for client, update, size in zip(
                    replies.clients.tolist(), replies.updates, replies.sizes.tolist(), strict=True
                )
            ]
            aggregate = strategy.aggregate_train
            if self._averages:
                plain = _flower("serverapp.strategy").FedAvg.aggregate_train
                aggregate = functools.partial(plain, strategy)
            arrays, _ = aggregate(replies.round + 1, answers)
        if arrays is None:  # the strategy leaves the model as it is
            self._model = model
            return np.zeros_like(model)
        self._model = np.asarray(next(iter(arrays.values())).numpy(), dtype=np.float64)
        return self._model - model

    def _arrays(self, model: FloatArray) -> Any:
        return self._flwr.ArrayRecord({"x": self._flwr.Array(model.copy())})

    def _reply(self, client: int, model: FloatArray, size: int) -> Any:
        app = self._flwr
        numbers: dict[str, float] = {self._key("weighted_by_key", "num-examples"): size}
        numbers[self._key("train_loss_key", "train_loss")] = 1.0
        key = self._key("arrayrecord_key", "arrays")
        content = app.RecordDict({key: self._arrays(model), "metrics": app.MetricRecord(numbers)})
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


def _make(strategy: Any) -> Any:
    if not callable(strategy):
        raise FedShuffleError(
            f"{strategy!r:.60} is no Flower strategy: give one, or what makes one when called"
            " without arguments."
        )
    try:
        with _quiet():
            return strategy()
    except FedShuffleError:
        raise
    except Exception as error:
        name = getattr(strategy, "__name__", repr(strategy))
        raise FedShuffleError(
            f"{name}() fails: {type(error).__name__}: {error}. Give a strategy with its arguments,"
            " or a function of yours without parameters that makes it."
        ) from error


def _flower(part: str) -> Any:
    try:
        return importlib.import_module(f"flwr.{part}")
    except ModuleNotFoundError as error:
        raise FedShuffleError(
            f"auditing a Flower strategy needs Flower ({error}):"
            " install it with pip install 'fedshuffle[flower]'."
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that Flower logs in every round."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _identity() -> Iterator[None]:
    """Messages carry the number of the run and of the node that sends them, which only a server
    process of Flower's has.
    """
    try:
        identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    except (ModuleNotFoundError, AttributeError):  # other versions do not ask for it
        yield
        return
    names = ("_run_id", "_node_id", "_task_id")
    before = {name: getattr(identity, name, None) for name in names}
    for name, value in before.items():
        setattr(identity, name, 1 if value is None else value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(identity, name, value)
