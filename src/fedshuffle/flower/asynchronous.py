r"""Asynchronous training of Flower apps as they are: no rounds, and the objective you meant.

A client that is done gets the current model at once. The server steps after every K updates,

.. math:: x \leftarrow x + \eta_g \sum_{j = 1}^K \frac{w_{i_j}}{p_{i_j}}\,
    \frac{\bar\tau}{\tau_j}\, s(\theta_j)\, (y_j - x_j), \qquad s(\theta) = (1 + \theta)^{-a},

where update j is of client :math:`i_j`, did :math:`\tau_j` steps from the model :math:`x_j` of
:math:`\theta_j` server steps ago, and :math:`p_i` is how much client i contributes per server step,
staleness weights included. FedBuff divides by K instead, so clients count by their speed.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedshuffle._arrays import FloatArray, count, number
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower.exchange import POLL_SECONDS, Outbox
from fedshuffle.flower.population import Report
from fedshuffle.flower.train_replies import TrainReply, check_start, move
from fedshuffle.flower.train_requests import check_keys, client_config
from fedshuffle.flower.weighting import Weighting
from fedshuffle.local_optimisers import SGD, LocalOptimiser
from fedshuffle.randomness import Purpose, check_seed, generator
from fedshuffle.timing import Asynchronous, resolve_schedule

_log = logging.getLogger("flwr.fedshuffle")
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
_MOST_FAILURES = 3
"""The run ends if every client fails so often, and none succeeds in between."""


@dataclass(frozen=True, eq=False)
class _Task:
    """What a client was sent: the model, and how many server steps came before."""

    node: int
    version: int
    arrays: ArrayRecord


@final
class ConsistentFedBuff:
    r"""FedBuff for Flower apps with a ``train`` of their own, in which slow clients count as much.

    Clients get and report what they do with :class:`ConsistentFedAvg`; a server step takes the
    place of a round. The probability :math:`p_i` is estimated: the sum of the staleness weights of
    the client's updates, over the server steps since it joined. Clients may join and leave at any
    time; the objective is that of all clients seen so far.

    Args:
        schedule: such as ``"fedbuff:K=10,C=100,a=0.5"``: a server step for every K updates, C
            clients at a time (by default all), staleness exponent a (by default 0). ``"fedasync"``
            steps for every update.
        objective: what counts alike, all ``"examples"`` or all ``"clients"``.
        optimiser, local_steps: what clients make their local steps with, and how many they are
            asked for, as for :class:`ConsistentFedAvg`.
        server_step_size: a factor of the server's step.
        seed: determines which idle clients are sent off, and the clients' seeds.
        min_available_nodes: how many nodes must be connected at the start.
        weighted_by_key, steps_key: the metrics in which clients report their examples and steps.
        arrayrecord_key, configrecord_key: the names of what clients are sent.

    >>> strategy = ConsistentFedBuff("fedbuff:K=10,C=100")  # was: FedAvg(fraction_train=0.1)
    """

    def __init__(
        self,
        schedule: str | Asynchronous = "fedbuff:K=10",
        *,
        objective: Literal["examples", "clients"] = "examples",
        optimiser: LocalOptimiser | str = SGD,
        local_steps: int | None = None,
        server_step_size: float = 1.0,
        seed: int = 0,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        steps_key: str = "num-steps",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
    ) -> None:
        found = resolve_schedule(schedule)
        if not isinstance(found, Asynchronous) or found.draw != "idle":
            raise FedShuffleError(
                f"schedule {str(found)!r} is not one of this strategy: write 'fedasync' or"
                " 'fedbuff:K=10,C=100'; ConsistentFedAvg has rounds."
            )
        self.schedule = found
        self._weighting = Weighting(objective, optimiser, local_steps, server_step_size)
        self.seed = check_seed(seed)
        self.min_available_nodes = count(min_available_nodes, "min_available_nodes")
        self.weighted_by_key, self.steps_key = weighted_by_key, steps_key
        self.arrayrecord_key, self.configrecord_key = arrayrecord_key, configrecord_key
        self.reports: dict[int, Report] = {}
        """What each client last said of itself."""
        self._joined: dict[int, int] = {}  # before which server step, by node
        self._contributed: defaultdict[int, float] = defaultdict(float)
        self._failures: Counter[int] = Counter()  # by node, since the last task that succeeded
        self._connected: list[int] = []
        self._sent = 0

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Train until the server has made ``num_rounds`` steps.

        Args:
            grid, initial_arrays: as for Flower's strategies.
            num_rounds: the number of server steps.
            timeout: seconds that a client may take for one task.
            train_config: what every client gets.
            evaluate_config: refused unless empty: clients are not asked to evaluate.
            evaluate_fn: called with the server step and the arrays, at the start and after each.
        """
        steps = count(num_rounds, "num_rounds")
        number(timeout, "timeout", within="(0, inf)")
        config = ConfigRecord() if train_config is None else train_config
        check_keys(config)
        check_start(initial_arrays)
        if evaluate_config:
            raise FedShuffleError(
                f"evaluate_config has {next(iter(evaluate_config))!r}, but this strategy does not"
                " ask clients to evaluate: leave it out, and evaluate on the server (evaluate_fn)."
            )
        _log.info(
            f"{self.schedule}, {self._weighting.objective} of all clients seen so far count alike"
        )
        self._joined = {}
        self._contributed.clear()
        self._failures.clear()
        result, outbox, version = Result(arrays=initial_arrays), Outbox[_Task](grid), 0
        buffer: list[tuple[_Task, TrainReply]] = []
        _evaluate(evaluate_fn, result, version)
        _log.info(f"waiting until {self.min_available_nodes} nodes are connected")
        while len(list(grid.get_node_ids())) < self.min_available_nodes:
            time.sleep(POLL_SECONDS)
        while version < steps:
            off = [_Task(node, version, result.arrays) for node in self._free(outbox, version)]
            for task in outbox.push(off, lambda task: self._message(task, config, timeout)):
                self._failed(task, "the SuperLink refused the message")
            # All, in the order of the nodes, before anybody is sent off again.
            arrived = sorted(outbox.pull(), key=lambda pair: pair[0].node)
            for task, reply in arrived:
                if (update := self._valid(task, reply)) is not None:
                    buffer.append((task, update))
                if len(buffer) == self.schedule.buffer and version < steps:
                    result.arrays, metrics = self._step(result.arrays, buffer, version)
                    version, buffer = version + 1, []
                    result.train_metrics_clientapp[version] = metrics
                    _evaluate(evaluate_fn, result, version)
            if not arrived:
                time.sleep(POLL_SECONDS)
        _log.info(f"{len(outbox.waiting)} tasks are under way, whose replies are dropped")
        return result

    def summary(self) -> None:
        """Refuse Flower's wrappers, which call this first: they need rounds."""
        raise FedShuffleError(
            "ConsistentFedBuff has no rounds, so another strategy cannot wrap it: leave out the"
            " wrapper, or use ConsistentFedAvg."
        )

    def _free(self, outbox: Outbox[_Task], version: int) -> list[int]:
        """The nodes that are sent off now: idle ones, as many as may train at a time."""
        self._connected = connected = sorted(outbox.grid.get_node_ids())
        if new := [node for node in connected if node not in self._joined]:
            _log.info(f"nodes {new} join: the objective is now also theirs")
            self._joined |= dict.fromkeys(new, version)
        busy = {task.node for task in outbox.waiting.values()}
        idle = [node for node in connected if node not in busy]
        # Those that failed are asked again once another succeeds, or if nobody else can train.
        idle = [node for node in idle if not self._failures[node]] or ([] if busy else idle)
        places = (self.schedule.concurrency or len(self._joined)) - len(outbox.waiting)
        if places >= len(idle):
            return idle
        draw = generator(self.seed, Purpose.DISPATCH, round=self._sent)
        chosen = draw.choice(len(idle), max(places, 0), replace=False)
        return [idle[k] for k in sorted(chosen.tolist())]

    def _message(self, task: _Task, config: ConfigRecord, timeout: float) -> Message:
        known, seed = self.reports.get(task.node), (self.seed, self._sent, task.node)
        own = client_config(config, task.version + 1, self._weighting.local_steps, known, seed)
        self._sent += 1
        content = RecordDict({self.arrayrecord_key: task.arrays, self.configrecord_key: own})
        return Message(content, dst_node_id=task.node, message_type="train", ttl=timeout)

    def _valid(self, task: _Task, message: Message) -> TrainReply | None:
        """A reply that counts; clients that fail are logged, wrong programs are an error."""
        keys = self.weighted_by_key, self.steps_key
        reply = TrainReply.read(message, task.arrays, *keys, first=not self.reports)
        if isinstance(reply, str):
            self._failed(task, reply)
            return None
        self._failures.clear()
        self.reports[task.node] = Report(reply.examples, reply.steps)
        return reply

    def _failed(self, task: _Task, why: str) -> None:
        self._failures[task.node] += 1
        _log.warning(f"server step {task.version}: node {task.node} failed: {why}")
        if min((self._failures[k] for k in self._connected), default=0) >= _MOST_FAILURES:
            raise FedShuffleError(
                f"{self._failures.total()} tasks in a row failed, the last at node {task.node}:"
                f" {why}"
            )

    def _step(
        self, x: ArrayRecord, buffer: list[tuple[_Task, TrainReply]], version: int
    ) -> tuple[ArrayRecord, MetricRecord]:
        """The model after a server step, and its metrics."""
        tasks, replies = zip(*buffer, strict=True)
        self._weighting.explain(replies)
        staleness = np.array([version - task.version for task in tasks])
        fresh = (1.0 + staleness) ** -self.schedule.staleness
        nodes = [task.node for task in tasks]
        for node, weight in zip(nodes, fresh.tolist(), strict=True):
            self._contributed[node] += weight
        weights, per_length = self._weights(nodes, replies, fresh, version)
        given, starts = [reply.arrays for reply in replies], [task.arrays for task in tasks]
        metrics = {
            "clients-known": len(self._joined),
            "mean-staleness": float(staleness.mean()),
            "max-staleness": int(staleness.max()),
        }
        _log.info(f"server step {version + 1}: nodes {nodes}, staleness {staleness.tolist()}")
        return move(x, given, weights, per_length, starts), MetricRecord(metrics)

    def _weights(
        self, nodes: list[int], replies: Sequence[TrainReply], fresh: FloatArray, version: int
    ) -> tuple[FloatArray, FloatArray]:
        """How much each update counts, and what corrects for the length of its steps."""
        weighting, reports = self._weighting, [*self.reports.values()]
        weights = weighting.weights(replies, reports) * fresh / len(self._joined)
        mean = weighting.mean_length(reports)
        assert mean is not None
        # What came now is counted: it makes the estimate exact for clients that come regularly.
        rates = [self._contributed[k] / (version + 1 - self._joined[k]) for k in nodes]
        return weights / np.array(rates), weighting.per_length(replies, mean)


def _evaluate(evaluate: Evaluate | None, result: Result, version: int) -> None:
    if evaluate is not None and (found := evaluate(version, result.arrays)) is not None:
        result.evaluate_metrics_serverapp[version] = found
