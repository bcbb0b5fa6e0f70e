"""A run in progress: the clients are known, and rounds follow one another."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import protocol
from fedshuffle.flower.client_registry import ClientRegistry
from fedshuffle.flower.pending_request import PendingRequest
from fedshuffle.flower.round import ClientRound
from fedshuffle.flower.server_model import Model
from fedshuffle.flower.transport import refuse_errors, send
from fedshuffle.kernel import LocalTraining, Request
from fedshuffle.methods import Cohort
from fedshuffle.state import State
from fedshuffle.training.rounds import Run

_log = logging.getLogger("flwr.fedshuffle")
MAX_EMPTY_ROUNDS = 3
"""The run stops after this many rounds in a row without any reply,"""
BY_CHANCE = 1e-6
"""unless that has at least this probability under the stated response probabilities."""


@dataclass(frozen=True)
class DropoutModel:
    """How often clients reply, and how long and how often the server asks."""

    response_probability: FloatArray
    """Per client, the probability that it replies to a message, retries included."""
    withheld: bool
    """Whether clients withhold their sizes."""
    timeout: float
    """Seconds to wait for one exchange."""
    retries: int


class Session:
    """The rounds of a run on a grid."""

    def __init__(
        self,
        run: Run,
        registry: ClientRegistry,
        model: Model,
        state: State,
        dropout: DropoutModel,
        record_cohorts: bool,
    ) -> None:
        self.run = run
        self.registry = registry
        self.model = model
        self.state = state
        self.dropout = dropout
        self.record_cohorts = record_cohorts
        self._server_seconds = 0.0
        self._begun = 0.0
        self._round: ClientRound | None = None
        self._pending: PendingRequest | None = None
        self._asked: dict[int, int] = {}
        self._missing: dict[int, str] = {}
        self._empty_rounds: list[float] = []
        """The stated probabilities of the last rounds in which nobody replied."""

    def arrays(self) -> ArrayRecord:
        """The model now."""
        return self.model.arrays(self.state.x)

    def run_round(self, grid: Grid) -> dict[str, Any]:
        """Run the next round; returns its record."""
        request = self._until_training(grid)
        if isinstance(request, LocalTraining):
            self._exchange(grid, request)
        return self._end()

    def training_messages(self, grid: Grid, arrays: ArrayRecord, round: int) -> list[Message]:
        """The first half of a round in Flower's own loop: the messages for local training."""
        self.state = replace(self.state, x=self.model.flat(arrays), round=round)
        request = self._until_training(grid)
        self._pending = None
        if isinstance(request, State):
            return []
        self._pending = pending = self._request(request)
        nodes = self.registry.nodes(grid, pending.clients)
        if len(nodes) < len(pending.clients):
            self.registry.wait_for_pending(grid)
            nodes = self.registry.nodes(grid, pending.clients)
        self._asked = {node: client for client, node in nodes.items() if node is not None}
        return [
            pending.write(client, node, self.dropout.timeout)
            for node, client in self._asked.items()
        ]

    def aggregate(self, replies: Iterable[Message]) -> dict[str, Any]:
        """The second half: aggregate the replies."""
        if self._round is None:
            raise FedShuffleError("nobody was asked yet: call configure_train first.")
        pending = self._pending
        if pending is not None:
            for reply in replies:
                try:
                    refuse_errors(reply)
                    client = self._asked.pop(reply.metadata.src_node_id, None)
                    if client is None:
                        raise FedShuffleError("its node was not asked, or replies twice.")
                    if reply.metadata.group_id != pending.group:
                        raise FedShuffleError(f"client {client} replies to another round.")
                    decoded = pending.read(client, reply)
                except FedShuffleError as error:
                    _log.warning("round %d: invalid reply: %s", self.state.round + 1, error)
                else:
                    pending.store(client, decoded)
            missing = [client for client in pending.clients if client not in pending.buffer]
            self._missing |= dict.fromkeys(missing, "did not reply")
            self._round.add_replies(pending.buffer, pending.steps)
        return self._end()

    def evaluate(self, grid: Grid) -> MetricRecord | None:
        """Metrics on the data of all clients that reply, averaged by objective weight."""
        found: dict[int, dict[str, float]] = {}
        x = protocol.arrays(x=self.state.x)

        def write(client: int, node: int, ttl: float) -> Message:
            query = protocol.Query(client, self.state.round)
            return Message(protocol.content(query, x), node, protocol.EVALUATE, ttl=ttl)

        def read(client: int, reply: Message) -> dict[str, float]:
            if (other := protocol.read(reply, protocol.Reply).client) != client:
                raise FedShuffleError(f"client {other} replied for client {client}.")
            records = list(reply.content.metric_records.values())
            numbers = dict(records[0]) if records else {}
            if not numbers or not all(isinstance(v, int | float) for v in numbers.values()):
                raise FedShuffleError("the reply has no metrics.")
            return {name: float(value) for name, value in numbers.items()}

        store, nodes = found.__setitem__, partial(self.registry.nodes, grid)
        connected = self.registry.connected(grid)
        missing = send(grid, connected, nodes, write, read, store, timeout=self.dropout.timeout)
        self._log_missing(missing, "evaluation")
        return self._averaged(found) if found else None

    def _averaged(self, found: dict[int, dict[str, float]]) -> MetricRecord:
        """The mean of each metric that half of the clients report, over finite values."""
        reported = Counter(name for numbers in found.values() for name in numbers)
        averages: dict[str, float] = {}
        for name in (name for name, times in reported.items() if 2 * times >= len(found)):
            good = {
                c: n[name] for c, n in sorted(found.items()) if math.isfinite(n.get(name, math.nan))
            }
            weights = self.run.federation.weights[list(good)]
            averages[name] = (
                float(np.average([*good.values()], weights=weights)) if good else math.nan
            )
            for client in sorted(found.keys() - good.keys()):
                value = found[client].get(name, "missing")
                _log.warning("evaluation: client %d is left out of %s: %s", client, name, value)
        return MetricRecord(averages | {"clients": len(found)})

    def _until_training(self, grid: Grid) -> LocalTraining | State:
        """Begin a round, and do all exchanges before local training."""
        self._begun, self._server_seconds, self._missing = time.perf_counter(), 0.0, {}
        self._pending = None
        self._round = ClientRound(self.run, self.state, self.dropout.response_probability)
        next_request = self._timed()(self._round.next)
        while not isinstance(request := next_request(), State | LocalTraining):
            self._exchange(grid, request)
        return request

    def _exchange(self, grid: Grid, request: Request) -> None:
        assert self._round is not None
        self._pending = pending = self._request(request)
        timed = self._timed()
        self._missing |= send(
            grid,
            pending.clients,
            partial(self.registry.nodes, grid),
            timed(pending.write),
            timed(pending.read),
            timed(pending.store),
            timeout=self.dropout.timeout,
            retries=self.dropout.retries,
        )
        self._round.add_replies(pending.buffer, pending.steps)

    def _request(self, request: Request) -> PendingRequest:
        return PendingRequest(self.run, self.state.round, request, self.dropout.withheld)

    def _end(self) -> dict[str, Any]:
        assert self._round is not None
        with self._timed():
            after = self._round.next()
        assert isinstance(after, State)
        self._refuse_infinite(after)
        asked, cohort = self.run.cohort(self.state.round), self._round.cohort
        self._log_missing(self._missing, f"round {after.round}")
        self._stop_if_nobody_replies(asked, cohort)
        self._round, self._pending, self.state = None, None, after
        size, direction = len(after.x) * after.x.element_size(), self.run.method.direction
        record = {"cohort": asked.clients.tolist()} if self.record_cohorts else {}
        return record | {
            "round": after.round,
            "clients": len(asked.clients),
            "replied": len(cohort.clients),
            "steps": int(cohort.done.sum()),
            "bytes_down": round(direction.down * size * len(asked.clients)),
            "bytes_up": round(direction.up * size * len(cohort.clients)),
            "missing": {str(client): why for client, why in sorted(self._missing.items())},
            "follows_dropout_model": self._follows_dropout_model(cohort),
            "seconds": time.perf_counter() - self._begun,
            "server_seconds": self._server_seconds,
        }

    def _refuse_infinite(self, after: State) -> None:
        """Updates that are finite one by one may have a weighted sum that is not."""
        kept = (*after.method_state.values(), *after.optimiser_state.values())
        if all(tensor.isfinite().all() for tensor in (after.x, *kept)):
            return
        largest = ""
        if self._pending and (norms := self._pending.norms):
            client = max(norms, key=norms.__getitem__)
            largest = f" Client {client} sent the largest update (norm {norms[client]:.0e})."
        raise FedShuffleError(
            f"the model would not be finite after round {after.round}, which was dropped.{largest}"
            " Lower the step sizes or leave that client out, and resume from the last checkpoint."
        )

    def _follows_dropout_model(self, cohort: Cohort) -> bool:
        """Whether the round follows the dropout model, and unfinished work is corrected for."""
        surprising = [
            client for client in self._missing if self.dropout.response_probability[client] == 1
        ]
        if surprising:
            _log.warning(
                "Round %d is biased: clients are missing that should always reply (%s). Give the"
                " probability that clients reply (response_probability=...), or ask again"
                " (retries=...).",
                self.state.round,
                ", ".join(map(str, surprising[:5])),
            )
        weight, full = self.run.method.averaging.weight, replace(cohort, done=cohort.planned)
        unfinished = cohort.clients[cohort.done < cohort.planned]
        repaired = np.allclose(weight(cohort) * cohort.done, weight(full) * full.done)
        if len(unfinished) and not repaired:
            _log.warning(
                "Round %d is biased: client %d and %d more did not finish their steps, which %s"
                " does not correct for. Use fedshuffle-gen (or NAME+fedshuffle-gen).",
                self.state.round,
                unfinished[0],
                len(unfinished) - 1,
                self.run.method.name,
            )
        return not surprising and (repaired or not len(unfinished))

    def _stop_if_nobody_replies(self, asked: Cohort, replied: Cohort) -> None:
        """A round without replies changes nothing; several in a row are an error."""
        if len(replied.clients) or not len(asked.clients):
            self._empty_rounds = []
            return
        self._empty_rounds.append(math.prod(1 - self.dropout.response_probability[asked.clients]))
        rounds = len(self._empty_rounds)
        if rounds >= MAX_EMPTY_ROUNDS and math.prod(self._empty_rounds) < BY_CHANCE:
            client, why = next(iter(self._missing.items()))
            raise FedShuffleError(
                f"no client replied in {rounds} rounds in a row, in the last"
                f" because client {client} {why}. Fix that, and resume from the last checkpoint."
            )

    def _log_missing(self, missing: dict[int, str], stage: str) -> None:
        for client, why in sorted(missing.items()):
            _log.warning("%s: client %d %s", stage, client, why)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add up the strategy's own computing time, without Flower's."""
        begun = time.process_time()
        try:
            yield
        finally:
            self._server_seconds += time.process_time() - begun
