"""A run in progress: the clients and the model are known, and rounds follow one another."""

import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor

from fedshuffle import fingerprint
from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import exchange, secure_aggregation
from fedshuffle.flower.chain import WireChain
from fedshuffle.flower.client_registry import ClientRegistry
from fedshuffle.flower.client_round import ClientRound
from fedshuffle.flower.exchange import Exchange, send
from fedshuffle.flower.local_training import TrainingOptions, local_training
from fedshuffle.flower.protocol import ClientInfo
from fedshuffle.flower.stragglers import limits
from fedshuffle.flower.update_buffer import UpdateBuffer
from fedshuffle.kernel import FullGradient, LocalTraining
from fedshuffle.methods import Cohort
from fedshuffle.probabilities import Replies
from fedshuffle.state import State
from fedshuffle.training.rounds import Run
from fedshuffle.training.simulation import reduced

if TYPE_CHECKING:
    from fedshuffle.flower.strategy import FedShuffleStrategy

_log = logging.getLogger("flwr.fedshuffle")
MAX_EMPTY_ROUNDS = 3
"""The run stops after this many rounds in a row without any reply,"""
BY_CHANCE = 1e-6
"""unless that has at least this probability under the stated response probabilities."""


class Model:
    """Which of all arrays of a model a client trains, in which order, and what the others are."""

    def __init__(self, arrays: ArrayRecord, info: ClientInfo) -> None:
        self.trained = {name: tuple(shape) for name, shape in info.parameters.items()}
        self.dtype = getattr(torch, info.dtype, None)
        if self.dtype not in (torch.float16, torch.float32, torch.float64):
            raise FedShuffleError(
                f"clients compute in {info.dtype}, which cannot be sent as a plain array. Use a"
                " model of float32, float64 or float16."
            )
        for name, shape in self.trained.items():
            if name not in arrays:
                raise FedShuffleError(
                    f"clients train {name!r}, which is not among the server's arrays. Build the"
                    " same model on both sides: ArrayRecord(model.state_dict())."
                )
            if (found := tuple(arrays[name].shape)) != shape:
                raise FedShuffleError(
                    f"parameter {name!r} has shape {found} on the server and {shape} on clients."
                    " Build the same model on both sides."
                )
        self._names = {name: info.tied.get(name, name) for name in arrays}
        self._rest = {k: array for k, array in arrays.items() if self._names[k] not in self.trained}
        for name, array in self._rest.items():
            values = torch.from_numpy(np.require(array.numpy(), requirements="W"))
            if info.frozen.get(name) != fingerprint.tensor(values):
                raise FedShuffleError(
                    f"{name!r} is not trained, and has other values on the server than on clients."
                    " Give both sides the same, such as the same file of pretrained weights."
                )

    def flat(self, arrays: ArrayRecord) -> Tensor:
        """What is trained, as one vector."""
        parts = [np.asarray(arrays[name].numpy()).reshape(-1) for name in self.trained]
        x = torch.from_numpy(np.concatenate(parts)).to(self.dtype)
        if not torch.isfinite(x).all():
            raise FedShuffleError("the server's model is not finite: give another start.")
        return x

    def arrays(self, x: Tensor) -> ArrayRecord:
        """All arrays by name, in the order in which they were given."""
        sizes = [math.prod(shape) for shape in self.trained.values()]
        pieces = zip(self.trained.items(), x.split_with_sizes(sizes), strict=True)
        trained = {name: Array(part.numpy().reshape(shape)) for (name, shape), part in pieces}
        return ArrayRecord(
            {name: trained.get(first) or self._rest[name] for name, first in self._names.items()}
        )


@dataclass
class Session:
    """The rounds of a run on a grid, with the timeout and the dropout model of the strategy."""

    strategy: "FedShuffleStrategy"
    grid: Grid
    run: Run
    registry: ClientRegistry
    model: Model
    state: State
    _state_after: dict[int, int] = field(default_factory=dict)
    """After how many rounds each client last replied, and so its state is known."""
    _empty_rounds: list[float] = field(default_factory=list)
    """The probabilities of the last rounds in which nobody replied."""

    def __post_init__(self) -> None:
        self.replies: Replies | None = None
        """Who replied so far, if response probabilities are estimated from that."""
        if (estimate := self.strategy.response_estimate) is not None:
            self.replies = Replies(estimate, len(self.run.federation))
            if self.state.replies:
                self.replies.restore(self.state.replies)

    def arrays(self) -> ArrayRecord:
        """The model now."""
        return self.model.arrays(self.state.x)

    def run_round(self) -> dict[str, Any]:
        """Run the next round; returns its record."""
        round = ClientRound(self.run, self.state, self._response_probability())
        while isinstance(request := round.next(), FullGradient):
            query = exchange.full_gradients(request)
            self._send(round, query)
            round.add_gradients(query.replies)
        if isinstance(request, LocalTraining):
            self._train(round, request)
        return self._end(round)

    def evaluate(self) -> MetricRecord | None:
        """Metrics on the data of all clients that reply, averaged by objective weight.

        A metric counts if half of them report it; values that are not finite are left out.
        """
        query = exchange.evaluation(self.registry.connected(), self.state.round, self.state.x)
        missing = send(self.grid, query, self.registry.nodes, self.strategy.timeout)
        _log_missing(missing, "evaluation")
        found = dict(sorted(query.replies.items()))
        reported = Counter(name for metrics in found.values() for name in metrics)
        means: dict[str, float] = {}
        for name in (name for name, times in reported.items() if 2 * times >= len(found)):
            values = {client: metrics.get(name, math.nan) for client, metrics in found.items()}
            good = [client for client, value in values.items() if math.isfinite(value)]
            weights, finite = self.run.federation.weights[good], [values[c] for c in good]
            means[name] = float(np.average(finite, weights=weights)) if good else math.nan
            for client in sorted(values.keys() - good):
                value = found[client].get(name, "missing")
                _log.warning("evaluation: client %d is left out of %s: %s", client, name, value)
        return MetricRecord(means | {"clients": len(found)}) if found else None

    def _response_probability(self) -> FloatArray:
        """That each client replies, as stated or as estimated from the rounds before."""
        if self.replies is None:
            return self.strategy.response_probability
        return self.replies.probabilities(np.arange(len(self.replies)))

    def _train(self, round: ClientRound, request: LocalTraining) -> None:
        secure, direction = self.strategy.secure_aggregation, self.run.method.direction
        training = local_training(
            request,
            TrainingOptions(
                self.run.workload.batch_size,
                self.strategy.withheld,
                None if secure is None else float(secure.clipping_range),
                round.weights(),
                WireChain(self.run.chain),
                self._state_after,
                self.state.clients,
                send_gradient=direction.client_state and direction.full_gradients > 0,
                must_finish=self.run.chain.private,
            ),
        )
        if secure is None:
            self._send(round, training)
            round.add_training(training.replies)
            return
        self.registry.wait_for_pending()
        nodes, timeout = self.registry.nodes(training.clients), self.strategy.timeout
        found, missing = secure_aggregation.aggregate(
            secure, self.grid, training, request, round.weights(), nodes, timeout
        )
        round.missing |= missing
        round.bytes.update(training.bytes)
        round.add_training(found)

    def _send(self, round: ClientRound, query: Exchange[UpdateBuffer]) -> None:
        elapsed = time.perf_counter() - round.begun
        timeout, first = limits(self.strategy.schedule, self.strategy.timeout, elapsed)
        retries, nodes = self.strategy.retries, self.registry.nodes
        round.missing |= send(self.grid, query, nodes, timeout, retries, first)
        round.bytes.update(query.bytes)

    def _end(self, done: ClientRound) -> dict[str, Any]:
        """Aggregate the replies; returns the record of the round."""
        after = done.next()
        assert isinstance(after, State)
        _refuse_infinite(after, done.trained)
        asked, cohort = self.run.cohort(self.state.round), done.cohort
        _log_missing(done.missing, f"round {after.round}")
        self._stop_if_nobody_replies(asked, done)
        if self.replies is not None:
            for asked_clients, replied in done.exchanges:
                self.replies.add(asked_clients, replied)
            kept = {name: torch.from_numpy(array) for name, array in self.replies.state().items()}
            after = replace(after, replies=kept)
        self.state = after
        self._state_after |= dict.fromkeys(cohort.clients.tolist(), after.round)
        record: dict[str, Any] = reduced(after.metrics, cohort)
        if self.strategy.record_cohorts:
            record["cohort"] = asked.clients.tolist()
        if self.run.mechanism:
            record["epsilon"] = self.run.mechanism.epsilon(after.round)
        return record | {
            "round": after.round,
            "clients": len(asked.clients),
            "replied": len(cohort.clients),
            "steps": int(cohort.done.sum()),
            "bytes_down": done.bytes["down"],
            "bytes_up": done.bytes["up"],
            "missing": {str(client): why for client, why in sorted(done.missing.items())},
            "follows_dropout_model": self._follows_dropout_model(done),
            "seconds": time.perf_counter() - done.begun,
        }

    def _follows_dropout_model(self, done: ClientRound) -> bool:
        """Whether the round follows the dropout model, and unfinished work is corrected for."""
        cohort, method, biased = done.cohort, self.run.method, f"Round {self.state.round} is biased"
        certain = (done.response_probability == 1) & (self.replies is None)
        expected = [c for c in done.missing if certain[c] or self.strategy.favours_fast]
        if expected and not self.strategy.favours_fast:  # which was said before
            some = ", ".join(map(str, expected[:5]))
            remedy = (
                " Give the probability that clients reply (response_probability=...), or ask again"
                " (retries=...)."
            )
            if self.strategy.secure_aggregation is not None:  # which has neither
                remedy = ""
            _log.warning(
                f"{biased}: clients are missing that should always reply ({some}).{remedy}"
            )
        weight, full = method.averaging.weight, replace(cohort, done=cohort.planned)
        unfinished = cohort.clients[cohort.done < cohort.planned]
        corrected = np.allclose(
            weight(cohort) * cohort.done_length, weight(full) * full.done_length
        )
        if len(unfinished) and not corrected:
            _log.warning(
                f"{biased}: client {unfinished[0]} and {len(unfinished) - 1} more did not finish"
                f" their steps, which {method.name} does not correct for. Use fedshuffle-gen (or"
                " NAME+fedshuffle-gen)."
            )
        return not expected and (corrected or not len(unfinished))

    def _stop_if_nobody_replies(self, asked: Cohort, done: ClientRound) -> None:
        """A round without replies changes nothing; several in a row are an error."""
        if len(done.cohort.clients) or not len(asked.clients):
            self._empty_rounds = []
            return
        self._empty_rounds.append(math.prod(1 - done.response_probability[asked.clients]))
        rounds = len(self._empty_rounds)
        if rounds >= MAX_EMPTY_ROUNDS and math.prod(self._empty_rounds) < BY_CHANCE:
            client, why = next(iter(done.missing.items()))
            raise FedShuffleError(
                f"no client replied in {rounds} rounds in a row, in the last"
                f" because client {client} {why}. Fix that, and resume from the last checkpoint."
            )


def _refuse_infinite(after: State, trained: object) -> None:
    """Updates that are finite one by one may have a weighted sum that is not."""
    states = after.method_state, after.optimiser_state, after.transform_state
    kept = [tensor for state in states for tensor in state.values()]
    if all(tensor.isfinite().all() for tensor in (after.x, *kept)):
        return
    largest = ""
    if isinstance(trained, UpdateBuffer) and trained.steps:
        norm, client = max((float(trained[c][0].double().norm()), c) for c in trained.steps)
        largest = f" Client {client} sent the largest update (norm {norm:.0e})."
    raise FedShuffleError(
        f"the model would not be finite after round {after.round}, which was dropped.{largest}"
        " Lower the step sizes or leave that client out, and resume from the last checkpoint."
    )


def _log_missing(missing: dict[int, str], stage: str) -> None:
    for client, why in sorted(missing.items()):
        level = logging.INFO if why == exchange.NOT_FIRST else logging.WARNING
        _log.log(level, "%s: client %d %s", stage, client, why)
