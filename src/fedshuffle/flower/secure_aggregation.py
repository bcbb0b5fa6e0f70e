r"""Secure aggregation: the server learns the weighted sum of the updates, and no single one.

The protocol is Flower's own SecAgg+. Aggregation weights are known before training, so client i
sends :math:`a_i u_i` as integers with random masks that cancel in the sum

.. math:: \sum_{i \in S} a_i u_i,

and no sum of weights is needed. What this protects, and what not: docs/how-to/security.md.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp import Grid
from torch import Tensor

from fedshuffle._arrays import number
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.flower import protocol
from fedshuffle.flower.exchange import POLL_SECONDS, Exchange, Node, Outbox
from fedshuffle.flower.update_buffer import UpdateBuffer
from fedshuffle.kernel import Answer, LocalTraining

try:
    from flwr.compat.common import recorddict_compat
except ImportError:  # where it was before
    from flwr.common import recorddict_compat

LEVELS = 2**30
"""The number of integers that a coordinate is rounded to."""
MODULUS = 2**52
"""Sums are exact below it: with fewer than MODULUS / LEVELS = 2^22 clients. Flower sends 64 bits
per coordinate, whatever the modulus."""


@dataclass(frozen=True)
class SecureAggregation:
    r"""Settings of Flower's SecAgg+.

    A coordinate of :math:`a_i u_i` is rounded to one of :math:`2^{30}` steps of the range
    :math:`[-R, R]`, up or down at random, so that its mean does not change. A coordinate of the sum
    over n clients then has a standard deviation of at most :math:`\sqrt{n} R / 2^{30}`.

    Args:
        clipping_range: R. Flower would silently clip what lies outside; here such a client fails,
            and the log names it. Too large costs only precision: 8 leaves steps of 1.5e-8.
        num_shares: neighbours with which a client shares its keys, itself included: a number from
            3, or a share of the cohort. Time and messages grow with it.
        reconstruction_threshold: how many of them must stay until the end, a number or a share.
            Fewer together cannot reveal a mask.

    Bell et al. 2020, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead".

    >>> SecureAggregation(clipping_range=1.0).num_shares
    1.0
    """

    clipping_range: float = 8.0
    num_shares: int | float = 1.0
    reconstruction_threshold: int | float = 0.67

    def __post_init__(self) -> None:
        number(self.clipping_range, "clipping_range", within="(0, inf)")
        with error_context(lambda error: f"secure aggregation: {error}", (ValueError, TypeError)):
            self.workflow(timeout=1.0)

    def workflow(self, timeout: float) -> SecAggPlusWorkflow:
        """Flower's side of the server. All clients have the weight 1, so its mean is their sum
        divided by their number.
        """
        return SecAggPlusWorkflow(
            self.num_shares,
            self.reconstruction_threshold,
            max_weight=1.0,
            clipping_range=float(self.clipping_range),
            quantization_range=LEVELS,
            modulus_range=MODULUS,
            timeout=timeout,
        )


@final
class SecureSum:
    """The weighted sum of the updates of the clients that replied."""

    def __init__(
        self,
        weights: Mapping[int, float],
        steps: Mapping[int, int],
        metrics: Mapping[int, Mapping[str, float]],
        sum: Tensor,
    ) -> None:
        self.steps = dict(steps)
        """The steps that each client did."""
        self._weights, self._metrics, self._sum = weights, metrics, sum

    def local_training(self, request: LocalTraining) -> Answer:
        """The answer to a request, if its weights are those that clients applied."""
        names = sorted({name for found in self._metrics.values() for name in found})
        metrics: dict[str, list[float]] = {name: [] for name in names}
        for task in request.tasks:
            client = task.minibatches.client
            if [*task.weights] != [self._weights[client]]:
                raise FedShuffleError(
                    f"the weight of client {client} depends on who replies, but with secure"
                    " aggregation clients apply their weights themselves. Use fedshuffle."
                )
            for name, values in metrics.items():
                values.append(self._metrics[client].get(name, math.nan))
        found = {name: np.array(values) for name, values in metrics.items()}
        return Answer(self._sum[None], metrics=found)


def aggregate(
    settings: SecureAggregation,
    grid: Grid,
    exchange: Exchange[UpdateBuffer],
    request: LocalTraining,
    weights: Mapping[int, float],
    nodes: Mapping[int, Node | None],
    timeout: float,
) -> tuple[SecureSum, dict[int, str]]:
    """Local training with secure aggregation; returns the sum, and the clients that are missing
    from it, with the reason.
    """
    connected = {client: node for client, node in nodes.items() if node is not None}
    missing = {client: "is not connected" for client in exchange.clients if client not in connected}
    steps = {task.minibatches.client: task.minibatches.steps for task in request.tasks}
    link, updates = _Link(grid), _Updates(exchange, connected)
    context = LegacyContext(
        Context(0, 0, {}, RecordDict(), {}), strategy=updates, client_manager=updates
    )
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord(
        {Key.CURRENT_ROUND: exchange.round + 1}
    )
    context.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
    settings.workflow(timeout)(link, context)
    lost = "was lost with the round, which needs more clients until the end of secure aggregation"
    for client in connected.keys() - updates.replied:
        missing[client] = link.errors.get(connected[client], lost)
    total = updates.mean * len(updates.replied)
    done = {client: steps[client] for client in updates.replied}
    exchange.bytes.update(link.bytes)
    return SecureSum(weights, done, updates.metrics, total.to(request.start)), missing


@final
class _Updates:
    """What Flower's workflow asks its strategy and its client manager for."""

    def __init__(self, exchange: Exchange[UpdateBuffer], nodes: Mapping[int, Node]) -> None:
        self._exchange, self._nodes = exchange, nodes
        self.replied: list[int] = []
        """The clients in the sum; none if Flower's workflow stopped early."""
        self.metrics: dict[int, Mapping[str, float]] = {}
        self.mean = torch.zeros(())

    def num_available(self) -> int:
        return len(self._nodes)

    def configure_fit(self, *_: object) -> list[tuple[SimpleNamespace, FitIns]]:
        return [
            (SimpleNamespace(node_id=node, client=client), _to_fit(self._exchange.write(client)))
            for client, node in self._nodes.items()
        ]

    def aggregate_fit(
        self, round: int, results: list[tuple[SimpleNamespace, FitRes]], failures: object
    ) -> tuple[None, dict[str, float]]:
        for proxy, fitted in results:
            # It is in the sum already, from which nobody can take it.
            with error_context(f"client {proxy.client} breaks secure aggregation", FedShuffleError):
                fields = protocol.parse(fitted.metrics, protocol.Reply)
                self.metrics[proxy.client] = self._exchange.checked(proxy.client, fields).metrics
        self.replied = sorted(self.metrics)
        (mean,) = parameters_to_ndarrays(results[0][1].parameters)
        self.mean = torch.from_numpy(mean)
        return None, {}


@final
class _Link:
    """The grid as Flower's workflow uses it: remembers errors, and waits no longer than needed."""

    def __init__(self, grid: Grid) -> None:
        self.errors: dict[Node, str] = {}
        """Of the first stage in which a client failed; it makes others fail in later ones."""
        self.bytes: Counter[str] = Counter()
        """Of all messages, ``down`` and ``up``."""
        self._grid = grid

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float) -> list[Message]:
        by_node = {message.metadata.dst_node_id: message for message in messages}
        for message in by_node.values():
            message.metadata.ttl = timeout
            self.bytes["down"] += _size(message.content)
        outbox, end, replies = Outbox[Node](self._grid), time.monotonic() + timeout, []
        refused = outbox.push(list(by_node), by_node.__getitem__)
        errors = dict.fromkeys(refused, "could not be asked: the SuperLink refused the message")
        while True:
            for node, reply in outbox.pull():
                if reply.has_error():
                    errors[node] = f"failed: {protocol.error_of(reply)}"
                else:
                    replies.append(reply)
                    self.bytes["up"] += _size(reply.content)
            if not outbox.waiting or time.monotonic() >= end:
                late = f"did not reply within {timeout:g} seconds"
                self.errors = self.errors or errors | dict.fromkeys(outbox.waiting.values(), late)
                return replies
            time.sleep(POLL_SECONDS)


def _size(content: RecordDict) -> int:
    """The bytes of the arrays, keys and masked vectors of a message of SecAgg+."""
    arrays = [array.data for record in content.array_records.values() for array in record.values()]
    values = [value for record in content.config_records.values() for value in record.values()]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    return sum(len(part) for part in [*arrays, *parts] if isinstance(part, bytes))


# The client's side: two mods around Flower's own.


def only_masked(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Refuse requests whose replies Flower would not mask."""
    kind = message.metadata.message_type
    plain = kind == protocol.TRAIN and RECORD_KEY_CONFIGS not in message.content.config_records
    if plain or kind == protocol.FULL_GRADIENT:
        raise FedShuffleError(
            "this client sends updates only with secure aggregation. Give the strategy"
            " secure_aggregation=SecureAggregation(...), and a method without full gradients."
        )
    return call_next(message, context)


def from_fit(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Translate between SecAgg+, which knows Flower's older messages only, and ours."""
    if message.metadata.message_type != protocol.TRAIN:
        return call_next(message, context)
    fit = recorddict_compat.recorddict_to_fitins(message.content, keep_input=True)
    fields = dict(fit.config)
    names = json.loads(str(fields.pop("names")))
    sent = parameters_to_ndarrays(fit.parameters)
    arrays = {tuple(name): Array(values) for name, values in zip(names, sent, strict=True)}
    message.content = protocol.join(fields, arrays)
    reply = call_next(message, context)
    fields, replied = protocol.split(reply.content)
    parameters = Parameters([array.data for array in replied.values()], "numpy.ndarray")
    fitted = FitRes(Status(Code.OK, ""), parameters, 1, fields)
    reply.content = recorddict_compat.fitres_to_recorddict(fitted, keep_input=True)
    return reply


MODS = (only_masked, secaggplus_mod, from_fit)
"""What a ``ClientApp`` of your own needs as its ``mods`` for secure aggregation."""


def _to_fit(content: RecordDict) -> FitIns:
    fields, arrays = protocol.split(content)
    parameters = Parameters([array.data for array in arrays.values()], "numpy.ndarray")
    config: dict[str, Any] = {**fields, "names": json.dumps([*arrays])}
    return FitIns(parameters, config)


def weighted(update: Tensor, weight: float, clipping_range: float) -> Tensor:
    """The weighted update, if Flower will not clip it."""
    values = update.double() * weight  # rounding in single precision would cost more than SecAgg+
    if (largest := float(values.abs().max())) > clipping_range:
        raise FedShuffleError(
            f"a coordinate of the weighted update is {largest:.3g}, outside the range"
            f" {clipping_range:g} of secure aggregation, which would clip it. Raise"
            " SecureAggregation(clipping_range=...), or clip updates."
        )
    return values
