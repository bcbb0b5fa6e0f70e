"""A strategy of Flower's message API (``flwr.serverapp.strategy``) as a server under audit.

A round runs as in Flower's own ``Strategy.start``: ``configure_train``, then ``aggregate_train``
with the clients' replies, but without a network. Which nodes the strategy would have picked is
ignored: the audit's sampling decides who replies. Flower's ``fraction_train`` is ``uniform:B``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.adapters.base import Aggregator, Replies
from fedshuffle.errors import FedShuffleError, error_context, optional_import, user_error

_ASKED = 4  # a strategy that asks for the nodes more often in a round waits for more of them


class FlowerAggregator(Aggregator):
    """A Flower strategy, or a class or function that makes one when called without arguments.

    ``nodes`` is the number of clients of the federation, which the strategy sees as nodes. Clients
    reply with their model under the strategy's key, their number of examples, and a loss of one.
    """

    resets = True
    _averages = False  # whether to leave out the optimiser that follows the average

    def __init__(self, strategy: Any, nodes: int, name: str | None = None) -> None:
        self._flwr = _flower("app")
        ensure_identity()
        is_strategy = hasattr(strategy, "aggregate_train") and not isinstance(strategy, type)
        made = strategy if is_strategy else _make(strategy)
        if not hasattr(made, "aggregate_train") or not hasattr(made, "configure_train"):
            raise FedShuffleError(
                f"{made!r:.60} is not a strategy of Flower's message API: it needs configure_train"
                " and aggregate_train, as those of flwr.serverapp.strategy have."
            )
        self.name, self._pristine, self._nodes = name or type(made).__name__, made, nodes
        self.reset()

    def reset(self) -> None:
        self._strategy = copy.deepcopy(self._pristine)
        self._model: FloatArray | None = None

    def average(self) -> FlowerAggregator | None:
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
        models, clients, sizes = model + replies.updates, replies.clients, replies.sizes
        with _quiet():
            # A list, as it may be a generator.
            list(strategy.configure_train(round, self._arrays(model), app.ConfigRecord({}), grid))
            clients_replies = zip(clients.tolist(), models, sizes.tolist(), strict=True)
            answers = [self._reply(*reply) for reply in clients_replies]
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

    def _reply(self, client: int, model: FloatArray, size: int) -> Any:
        app = self._flwr
        weight, loss = ("weighted_by_key", "num-examples"), ("train_loss_key", "train_loss")
        numbers: dict[str, float] = {self._key(*weight): size, self._key(*loss): 1.0}
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
            f"{strategy!r:.60} is not a Flower strategy: give one, or what makes one when called"
            " without arguments."
        )
    fails = f"{getattr(strategy, '__name__', repr(strategy))}() fails"
    remedy = "Give a strategy with its arguments, or a function without parameters that makes it."
    with _quiet(), error_context(lambda error: f"{fails}: {user_error(error)}. {remedy}"):
        return strategy()


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
    """Set the ids that messages carry, unless this is one of Flower's processes, which has them."""
    identity = _flower("supercore.task_identity").TaskIdentity
    for name in ("run_id", "node_id", "task_id"):
        try:
            getattr(identity, name)
        except RuntimeError:  # it is not set
            setattr(identity, name, 1)
