r"""A strategy for Flower apps as they are: the user's own ``train``, with the right weights.

The server moves by

.. math:: x \leftarrow x + \eta_g \sum_{i \in S}
    \frac{w_i}{p_i} \, \frac{\bar\tau_i}{\tau_i} \, (y_i - x),

where :math:`p_i` is the probability that client i is among the replies
(:mod:`fedshuffle.flower.population`), :math:`\tau_i` the number of steps that it did, and
:math:`\bar\tau_i` the number that its step size was made for: the rule of ``fedshuffle-gen``
(:mod:`fedshuffle.methods.averaging`). With momentum, the steps count by their length
(:mod:`fedshuffle.local_optimisers`).
"""

import logging
import time
from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fedshuffle._arrays import FloatArray, count, expect, number
from fedshuffle.errors import FedShuffleError, check_known, one_line, unknown
from fedshuffle.flower import stragglers
from fedshuffle.flower.checks import response_estimate
from fedshuffle.flower.population import Population, Report
from fedshuffle.flower.train_replies import TrainReply, check_start, move
from fedshuffle.flower.train_requests import check_keys, client_config
from fedshuffle.flower.weighting import Weighting
from fedshuffle.local_optimisers import SGD, LocalOptimiser
from fedshuffle.probabilities import Estimate
from fedshuffle.randomness import Purpose, check_seed, generator
from fedshuffle.timing import OverSelection, TrainingSchedule, Wait

_log = logging.getLogger("flwr.fedshuffle")

_MOST_EMPTY_ROUNDS = 3
"""The run ends if nobody has replied in the first rounds."""
_CLIPPING_NORM = "clipping_norm"  # the config key of Flower's wrappers for clipping at clients


class ConsistentFedAvg(FedAvg):  # type: ignore[misc]  # Flower is untyped here
    r"""Flower's FedAvg, with the weights that minimise the objective you meant.

    Takes the place of ``FedAvg(...)`` in an app and sends the same messages. A client reports, next
    to ``num-examples``, the local steps that it did, as ``num-steps``. The aggregation divides by
    inclusion probabilities instead of the sum over the cohort, and by each client's number of
    steps; its length is that of FedAvg. docs/how-to/migrate-a-flower-app.md says what is exact.

    Every client gets ``train_config`` with three more keys: ``server-round``, as from FedAvg;
    ``seed``, which differs by client and round; and ``planned-steps``, which is ``local_steps``, or
    what the client last reported as ``num-steps``, 0 if that is not known.

    Args:
        args, fedavg: Flower's own arguments of FedAvg, such as ``fraction_train``.
        objective: what counts alike, all ``"examples"`` or all ``"clients"``.
        optimiser: what clients make their local steps with, new in each round, as in
            :class:`~fedshuffle.LocalWork`: ``"sgd:momentum=0.9"`` for
            ``torch.optim.SGD(..., momentum=0.9)``. Steps are weighted by how far they go.
        step_sizes: ``"equal"`` leaves step sizes alone. ``"scaled"`` sends every client its own,
            in inverse proportion to its steps, as FedShuffle does: the ``lr`` of ``train_config``
            is that of a client with the mean number of steps. Clients must use it.
        response_probability: by default all connected clients are taken to reply alike, and the
            objective of a round is that of the connected clients. With ``"estimate"``, or another
            rule of :mod:`fedshuffle.probabilities`, the objective is that of all clients seen so
            far: for each of them it is estimated how often it is connected, and how often it
            replies. A client that joins enters the objective, which the log and the metrics of the
            round say. If you know how likely each client replies, give that by node id:
            ``{NODE_ID: 0.9, ...}``; the objective is that of the connected clients.
        schedule: for whom a round waits: all (``"wait"``), those who reply in time
            (``"deadline:60"``, in seconds), or the first of more that are asked (``"over:8of10"``,
            in place of ``fraction_train``). Replies that come later are dropped, and
            ``response_probability`` is that of being in time.
        forget_after: with an estimate, a client that is away for this many rounds in a row leaves
            the objective, and joins as a new one if it returns. By default it stays: rounds then
            go less far, by its share.
        local_steps: the number of steps that clients are asked for, as ``planned-steps``; by
            default every client decides for itself.
        mean_examples: the mean number of examples of a client. It sets the length of the server's
            step only. By default it is estimated from earlier rounds.
        server_step_size: a factor of the server's step.
        seed: determines who is sampled, and the clients' seeds.
        steps_key: the metric in which clients report their steps.
        step_size_key: the key of the step size in ``train_config``.

    >>> strategy = ConsistentFedAvg(fraction_train=0.5)  # was: FedAvg(fraction_train=0.5)
    """

    def __init__(
        self,
        *args: Any,
        objective: Literal["examples", "clients"] = "examples",
        optimiser: LocalOptimiser | str = SGD,
        step_sizes: Literal["equal", "scaled"] = "equal",
        response_probability: str | Estimate | Mapping[int, float] | None = None,
        schedule: str | TrainingSchedule = "wait",
        forget_after: int | None = None,
        local_steps: int | None = None,
        mean_examples: float | None = None,
        server_step_size: float = 1.0,
        seed: int = 0,
        steps_key: str = "num-steps",
        step_size_key: str = "lr",
        **fedavg: Any,
    ) -> None:
        ours, theirs = (signature(each).parameters for each in (ConsistentFedAvg, FedAvg))
        for name in fedavg:
            check_known("argument of ConsistentFedAvg", name, {*ours, *theirs} - {"args", "fedavg"})
        super().__init__(*args, **fedavg)
        if step_sizes not in (known := ["equal", "scaled"]):
            raise unknown("step_sizes", step_sizes, known)
        self.step_sizes = step_sizes
        self._weighting = Weighting(
            objective, optimiser, local_steps, server_step_size, mean_examples
        )
        given: Mapping[int, float] | None = None
        estimate: Estimate | None = None
        if isinstance(response_probability, Mapping):
            given = response_probability
        else:
            estimate = response_estimate(response_probability)
        self.schedule = stragglers.synchronous(schedule)
        if isinstance(self.schedule, OverSelection):
            asks = f"schedule {str(self.schedule)!r} asks {self.schedule.ask} clients"
            if self.fraction_train != 1.0:
                raise FedShuffleError(f"{asks}, whoever is connected: leave out fraction_train.")
            if self.min_train_nodes > self.schedule.ask:
                raise FedShuffleError(
                    f"{asks}, fewer than min_train_nodes={self.min_train_nodes}: ask more, or lower"
                    " it."
                )
        number(self.fraction_train, "fraction_train", within="[0, 1]")
        for name in ("min_train_nodes", "min_available_nodes"):
            count(getattr(self, name), name, least=0)
        self.seed = check_seed(seed)
        self.steps_key, self.step_size_key = steps_key, step_size_key
        if forget_after is not None and count(forget_after, "forget_after") and not estimate:
            raise FedShuffleError(
                "without an estimate, clients that are away are no part of the objective: leave out"
                ' forget_after, or give response_probability="estimate".'
            )
        self.population = Population(estimate, forget_after, given)
        """The clients that were seen so far."""
        self._planned: dict[int, float] = {}
        """The length of the steps that each one's step size was made for,"""
        self._sent = ArrayRecord()
        """the model that they got,"""
        self._messages: list[Message] = []
        """and the messages with it."""
        self._round = self._rounds_before = 0
        self._private = self._own_loop = self._trained = False

    def start(self, grid: Grid, *args: Any, **options: Any) -> Result:
        """Run all rounds, as Flower's FedAvg does; called again, with the numbers that follow."""
        self._own_loop, self._rounds_before = True, self._round
        if not isinstance(self.schedule, Wait):
            grid = stragglers.ScheduledGrid(grid, self.schedule)
        result = super().start(grid, *args, **options)
        for said in self.population.drift_warnings(self._round):
            _log.warning(said)
        return result

    def state_dict(self) -> dict[str, Any]:
        """What the strategy knows of its clients after a round, as plain data for a JSON file.

        Save it with the model, such as in ``evaluate_fn``; :meth:`load_state_dict` goes on from it.
        """
        return {"round": self._round, **self.population.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned: its clients, estimates and round.

        >>> strategy, resumed = (ConsistentFedAvg(response_probability="estimate") for _ in "ab")
        >>> resumed.load_state_dict(strategy.state_dict())
        """
        expect(state, Mapping, "the state")
        done = count(state.get("round"), "round of the state", least=0)
        self.population.restore(state)
        self._round = self._rounds_before = done

    def summary(self) -> None:
        """Log what is about to run."""
        super().summary()
        objective = self._weighting.objective
        clients = "clients seen so far" if self.population.estimate else "connected clients"
        _log.info(f"divides by inclusion probability, {objective} of all {clients} count alike")
        _log.info(f"local steps are taken to be those of {self._weighting.optimiser}")
        corrected = self.population.estimate or self.population.given
        if not corrected and not isinstance(self.schedule, Wait):
            _log.warning(stragglers.slow_clients_count_less(self.schedule))
        if not self._own_loop:
            _log.warning(
                "Another strategy calls this one. If it clips, it does so before steps are"
                " accounted for, so the clients that move furthest count less. If it adds noise for"
                " differential privacy, that is made for weights of 1 / clients: use"
                ' objective="clients" and local_steps, and leave out response_probability.'
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients uniformly, and write a message to each."""
        if self.fraction_train == 0.0:
            return []
        self._private = _CLIPPING_NORM in config and not self._own_loop
        self._check_config(config)
        if not self._trained:
            check_start(arrays)
        if not self._own_loop and not isinstance(self.schedule, Wait):
            raise FedShuffleError(
                "only this strategy's own start keeps a schedule, and another one calls it: leave"
                " out schedule, or the wrapper."
            )
        self._round = self._rounds_before + server_round
        population = self.population
        population.begin(self._wait_for_nodes(grid))
        connected = population.connected
        if said := population.change():
            _log.info(f"round {self._round}: {said}")
        if said := population.warning():
            _log.warning(f"round {self._round}: {said}")
        self._sent = arrays
        size = max(int(len(connected) * self.fraction_train), self.min_train_nodes, 1)
        if isinstance(self.schedule, OverSelection):
            size = self.schedule.ask
        size = min(size, len(connected))
        draw = generator(self.seed, Purpose.COHORT, round=self._round)
        chosen = sorted(draw.choice(len(connected), size, replace=False).tolist())
        population.asked = [connected[k] for k in chosen]
        _log.info(f"configure_train: sampled {size} nodes (out of {len(connected)})")
        mean, self._planned = self._weighting.mean_length(population.known), {}
        self._messages = []
        for node in population.asked:
            known = population.reports.get(node)
            seed = self.seed, self._round, node
            own = client_config(config, self._round, self._weighting.local_steps, known, seed)
            if self.step_sizes == "scaled" and mean is not None:
                planned = (self._weighting.mean_length([known]) if known else None) or mean
                self._planned[node] = planned
                own[self.step_size_key] = float(config[self.step_size_key]) * (mean / planned)
            content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: own})
            self._messages.append(Message(content, dst_node_id=node, message_type="train"))
        return self._messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As Flower's FedAvg does, with the number of the round that training has."""
        now = self._rounds_before + server_round
        messages: Iterable[Message] = super().configure_evaluate(now, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The next model, and the metrics of the clients' training."""
        first = not self._trained
        valid = self._valid(list(replies), server_round)
        if not valid:
            self.population.end({})
            self._check_empty(server_round)
            return None, None
        weights, per_length = self._weights(valid)
        self._check_private(weights * per_length)
        self.population.end(_reports(valid))
        self._weighting.explain(valid)
        given = [reply.arrays for reply in valid]
        arrays = move(self._sent, given, weights, per_length)
        metrics = self._train_metrics([reply.content for reply in valid], first)
        return arrays, MetricRecord({**self.population.metrics(), **metrics})

    def _train_metrics(self, contents: list[RecordDict], first: bool) -> Mapping[str, Any]:
        """The clients' metrics; after the first round an error would cost more than they do."""
        try:
            return self.train_metrics_aggr_fn(contents, self.weighted_by_key) or {}
        except Exception as error:
            said = (
                f"the clients' metrics cannot be aggregated: {one_line(error)}. Let all report the"
                " same, or give a train_metrics_aggr_fn of your own."
            )
            if first:
                raise FedShuffleError(said) from error
            _log.warning(f"round {self._round}: {said}")
            return {}

    def _weights(self, replies: list[TrainReply]) -> tuple[FloatArray, FloatArray]:
        r"""How much each client counts, :math:`w_i / p_i`, and what corrects for the length of its
        steps, :math:`\eta_g \bar\tau_i / \tau_i`.

        Nothing here depends on who is sampled in this round, except in the first, so the mean
        step is that of full participation.
        """
        past = self.population.known or [*_reports(replies).values()]
        mean = self._weighting.mean_length(past)
        assert mean is not None
        planned = np.array([self._planned.get(reply.node, mean) for reply in replies])
        probability = self.population.inclusion([reply.node for reply in replies])
        weights = self._weighting.weights(replies, past) / self.population.size / probability
        return weights, self._weighting.per_length(replies, planned)

    def _wait_for_nodes(self, grid: Grid) -> list[int]:
        shown, wanted = -1, max(self.min_available_nodes, self.min_train_nodes, 1)
        while len(nodes := sorted(grid.get_node_ids())) < wanted:
            if len(nodes) != shown:
                shown = len(nodes)
                _log.info(f"waiting for nodes: {shown} connected, at least {wanted} are needed")
            time.sleep(1)
        return nodes

    def _check_config(self, config: ConfigRecord) -> None:
        check_keys(config)
        if self.population.estimate and self._private:
            raise FedShuffleError(
                "estimated probabilities depend on who took part, so weights tell who did, and the"
                " privacy of Flower's wrapper would not hold: leave out response_probability."
            )
        if self.step_sizes == "scaled":
            if self.step_size_key not in config:
                raise FedShuffleError(
                    f'step_sizes="scaled" needs the step size in {self.step_size_key!r}, which'
                    " train_config lacks: give start(..., train_config=ConfigRecord"
                    f"({{{self.step_size_key!r}: 0.1}})), and let clients use what they get there."
                )
            name = f"{self.step_size_key!r} of train_config"
            number(config[self.step_size_key], name, within="(0, inf)")

    def _valid(self, replies: list[Message], server_round: int) -> list[TrainReply]:
        """The replies that count; clients that fail are logged, wrong programs are an error."""
        valid, failed, waiting = [], [], {*self.population.connected}
        silent = {*self.population.asked} if isinstance(self.schedule, Wait) else set()
        # An error of Flower's own, such as for a lost node, does not come from that node.
        sent = {m.metadata.message_id: m.metadata.dst_node_id for m in self._messages}
        for message in replies:
            keys = self.weighted_by_key, self.steps_key
            reply = TrainReply.read(message, self._sent, *keys, first=not self._trained)
            node = message.metadata.src_node_id
            if message.has_error():
                node = sent.get(message.metadata.reply_to_message_id, node)
            silent.discard(node)
            if isinstance(reply, str):
                failed.append((node, reply))
            elif node not in waiting:
                failed.append((node, "it replies twice, or is not connected"))
            else:
                waiting.remove(node)
                valid.append(reply)
        late = [(node, "it did not reply in time (timeout of start)") for node in sorted(silent)]
        for node, why in failed + late:
            _log.warning(f"round {server_round}: node {node} failed: {why}")
        if failed and not valid and not self._trained:
            node, why = failed[0]
            raise FedShuffleError(
                f"no client could train in round {server_round}. Node {node} (and"
                f" {len(failed) - 1} more) failed: {why}"
            )
        self._trained = self._trained or bool(valid)
        if failed or late:
            _log.warning(
                f"round {server_round}: {len(valid)} of {len(replies) + len(late)} clients count."
                " The mean round is right if failures do not depend on clients' data."
            )
        return sorted(valid, key=lambda reply: reply.node)  # sums do not depend on who was first

    def _check_private(self, weights: FloatArray) -> None:
        """Refuse weights for which the noise of Flower's wrapper is not made."""
        excess = float(weights.max()) * len(weights)
        if self._private and excess > 1 + 1e-6:
            raise FedShuffleError(
                "Flower's wrapper makes its noise for clients that count 1 /"
                f" {len(weights)} each, and here one counts {excess:.3g} times as much: the privacy"
                ' that it claims would not hold. Use objective="clients" and local_steps, which'
                " clients must do (planned-steps), or FedShuffleStrategy(privacy=...)."
            )

    def _check_empty(self, server_round: int) -> None:
        """A round without replies changes nothing; only such rounds are an error."""
        if not self.population.asked:
            return
        _log.warning(f"round {server_round}: no reply counts, and the model stays as it is")
        if self._own_loop and not self._trained and server_round >= _MOST_EMPTY_ROUNDS:
            raise FedShuffleError(
                f"no client has replied in {server_round} rounds: give them more time (timeout of"
                " start, or the deadline of schedule)."
            )


def _reports(replies: Iterable[TrainReply]) -> dict[int, Report]:
    return {reply.node: Report(reply.examples, reply.steps) for reply in replies}
