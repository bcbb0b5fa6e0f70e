"""A run that has begun: the clients are known, and rounds follow one another."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar, final

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import messages
from fedshuffle.flower.asking import Asking
from fedshuffle.flower.exchange import ask, refuse_errors
from fedshuffle.flower.model import Model
from fedshuffle.flower.roster import Roster
from fedshuffle.flower.round import Round
from fedshuffle.kernel import Request, Walk
from fedshuffle.methods import Participants
from fedshuffle.rounds import Run
from fedshuffle.state import State

_log = logging.getLogger("flwr.fedshuffle")
IN_VAIN = 3
"""After so many rounds in a row without any answer, the run stops,"""
BY_CHANCE = 1e-6
"""unless that is likelier than this by the stated probabilities to answer."""

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@final
@dataclass(frozen=True)
class Terms:
    """How clients are asked, and what is expected of them."""

    answers: FloatArray
    """For every client the probability that it answers when asked."""
    withheld: bool
    """Whether clients keep their sizes to themselves."""
    timeout: float
    """Seconds to wait for one exchange."""
    retries: int
    """How often a client is asked again."""


@final
class Session:
    """The rounds of a run on a grid.

    Args:
        run: the settings.
        roster: who is who.
        model: names and shapes.
        state: where to begin.
        terms: how clients are asked.
    """

    def __init__(self, run: Run, roster: Roster, model: Model, state: State, terms: Terms) -> None:
        self.run = run
        self.roster = roster
        self.model = model
        self.state = state
        self.terms = terms
        self._watch = _Stopwatch()
        self._begun = 0.0
        self._round: Round | None = None
        self._asking: Asking | None = None
        self._asked: dict[int, int] = {}
        self._missing: dict[int, str] = {}
        self._in_vain: list[float] = []
        """The stated probabilities of the last rounds, if nobody answered in them."""

    def arrays(self) -> ArrayRecord:
        """The model now."""
        return self.model.arrays(self.state.x)

    def play(self, grid: Grid) -> dict[str, Any]:
        """The next round; what there is to say about it."""
        request = self._until_walk(grid)
        if isinstance(request, Walk):
            self._ask(grid, request)
        return self._end()

    def orders(self, grid: Grid, arrays: ArrayRecord, round: int) -> list[Message]:
        """The first half of a round in somebody else's loop: the messages of the walk."""
        self.state = replace(self.state, x=self.model.flat(arrays), round=round)
        request = self._until_walk(grid)
        self._asking = None
        if isinstance(request, State):
            return []
        self._asking = asking = Asking(self.run, self.state.round, request, self.terms.withheld)
        nodes = self.roster.nodes(grid, asking.clients)
        if len(nodes) < len(asking.clients):
            self.roster.settle(grid)
            nodes = self.roster.nodes(grid, asking.clients)
        self._asked = {node: client for client, node in nodes.items() if node is not None}
        return [
            asking.write(client, node, self.terms.timeout) for node, client in self._asked.items()
        ]

    def aggregate(self, replies: Iterable[Message]) -> dict[str, Any]:
        """The second half."""
        if self._round is None:
            raise FedShuffleError("nobody was asked yet: call configure_train first.")
        asking = self._asking
        if asking is not None:
            for reply in replies:
                try:
                    refuse_errors(reply)
                    client = self._asked.pop(reply.metadata.src_node_id, None)
                    if client is None:
                        raise FedShuffleError("its node was not asked, or answers twice.")
                    if reply.metadata.group_id != asking.group:
                        raise FedShuffleError(f"client {client} answers to another round.")
                    answer = asking.read(client, reply)
                except FedShuffleError as error:
                    _log.warning("round %d: an answer is no good: %s", self.state.round + 1, error)
                else:
                    asking.keep(client, answer)
            missing = [client for client in asking.clients if client not in asking.spool]
            self._missing |= dict.fromkeys(missing, "did not answer")
            self._round.answered(asking.spool, asking.steps)
        return self._end()

    def evaluate(self, grid: Grid) -> MetricRecord | None:
        """Metrics of the model on the data of all clients that answer, by objective weight."""
        found: dict[int, dict[str, float]] = {}
        x = messages.arrays(x=self.state.x)

        def write(client: int, node: int, ttl: float) -> Message:
            question = messages.Question(client, self.state.round)
            return Message(messages.content(question, x), node, messages.EVALUATE, ttl=ttl)

        def read(client: int, reply: Message) -> dict[str, float]:
            if (other := messages.read(reply, messages.Done).client) != client:
                raise FedShuffleError(f"client {other} answered for client {client}.")
            records = list(reply.content.metric_records.values())
            numbers = dict(records[0]) if records else {}
            if not numbers or not all(isinstance(v, int | float) for v in numbers.values()):
                raise FedShuffleError("the answer has no metrics.")
            return {name: float(value) for name, value in numbers.items()}

        keep, places = found.__setitem__, partial(self.roster.nodes, grid)
        connected = self.roster.connected(grid)
        missing = ask(grid, connected, places, write, read, keep, timeout=self.terms.timeout)
        self._log_missing(missing, "evaluation")
        return self._averaged(found) if found else None

    def _averaged(self, found: dict[int, dict[str, float]]) -> MetricRecord:
        """Every metric that half of the clients tell, over those who tell a finite number."""
        told = Counter(name for numbers in found.values() for name in numbers)
        averages: dict[str, float] = {}
        for name in (name for name, times in told.items() if 2 * times >= len(found)):
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

    def _until_walk(self, grid: Grid) -> Walk | State:
        """Begin a round, and ask all that the method asks before the walk."""
        self._begun, self._watch.seconds, self._missing = time.perf_counter(), 0.0, {}
        self._asking = None
        self._round = Round(self.run, self.state, self.terms.answers)
        while not isinstance(request := self._watch.timed(self._round.next)(), State | Walk):
            self._ask(grid, request)
        return request

    def _ask(self, grid: Grid, request: Request) -> None:
        assert self._round is not None
        self._asking = asking = Asking(self.run, self.state.round, request, self.terms.withheld)
        self._missing |= ask(
            grid,
            asking.clients,
            partial(self.roster.nodes, grid),
            self._watch.timed(asking.write),
            self._watch.timed(asking.read),
            self._watch.timed(asking.keep),
            timeout=self.terms.timeout,
            retries=self.terms.retries,
        )
        self._round.answered(asking.spool, asking.steps)

    def _end(self) -> dict[str, Any]:
        assert self._round is not None
        after = self._watch.timed(self._round.next)()
        assert isinstance(after, State)
        self._refuse_infinite(after)
        asked, cohort = self.run.cohort(self.state.round), self._round.cohort
        self._log_missing(self._missing, f"round {after.round}")
        self._give_up_if_in_vain(asked, cohort)
        self._round, self._asking, self.state = None, None, after
        size, direction = len(after.x) * after.x.element_size(), self.run.method.direction
        return {
            "round": after.round,
            "clients": len(asked.clients),
            "answered": len(cohort.clients),
            "steps": int(cohort.done.sum()),
            "bytes_down": round(direction.down * size * len(asked.clients)),
            "bytes_up": round(direction.up * size * len(cohort.clients)),
            "cohort": asked.clients.tolist(),
            "missing": {str(client): why for client, why in sorted(self._missing.items())},
            "as_stated": self._as_stated(cohort),
            "seconds": time.perf_counter() - self._begun,
            "server_seconds": self._watch.seconds,
        }

    def _refuse_infinite(self, after: State) -> None:
        """Numbers that are finite one by one may not be so when they are weighed and added."""
        if all(tensor.isfinite().all() for tensor in (after.x, *after.memory.values())):
            return
        whose = ""
        if self._asking and (lengths := self._asking.lengths):
            client = max(lengths, key=lengths.__getitem__)
            whose = f" Client {client} sent the largest numbers (norm {lengths[client]:.0e})."
        raise FedShuffleError(
            f"the model would not be finite after round {after.round}, which does not count."
            f"{whose} Lower the step sizes or leave that client out, and go on from the last"
            " checkpoint."
        )

    def _as_stated(self, cohort: Participants) -> bool:
        """Whether the round is one of the stated dropout model, and unfinished work is repaired."""
        surprising = [client for client in self._missing if self.terms.answers[client] == 1]
        if surprising:
            _log.warning(
                "The estimate of round %d is biased: clients are missing that were stated to answer"
                " always (%s). State with which probability clients answer (answers=...), or ask"
                " again (retries=...).",
                self.state.round,
                ", ".join(map(str, surprising[:5])),
            )
        weight, full = self.run.method.averaging.weight, replace(cohort, done=cohort.planned)
        unfinished = cohort.clients[cohort.done < cohort.planned]
        repaired = np.allclose(weight(cohort) * cohort.done, weight(full) * full.done)
        if len(unfinished) and not repaired:
            _log.warning(
                "The estimate of round %d is biased: client %d and %d more did not finish their"
                " steps, which %s does not repair. Use fedshuffle-gen (or NAME+fedshuffle-gen).",
                self.state.round,
                unfinished[0],
                len(unfinished) - 1,
                self.run.method.name,
            )
        return not surprising and (repaired or not len(unfinished))

    def _give_up_if_in_vain(self, asked: Participants, answered: Participants) -> None:
        """A round in which nobody answers changes nothing; some in a row may be no accident."""
        if len(answered.clients) or not len(asked.clients):
            self._in_vain = []
            return
        self._in_vain.append(math.prod(1 - self.terms.answers[asked.clients]))
        if len(self._in_vain) >= IN_VAIN and math.prod(self._in_vain) < BY_CHANCE:
            client, why = next(iter(self._missing.items()))
            raise FedShuffleError(
                f"nobody answered in {len(self._in_vain)} rounds in a row, in the last because"
                f" client {client} {why}. Put that right, and go on from the last checkpoint."
            )

    def _log_missing(self, missing: dict[int, str], stage: str) -> None:
        for client, why in sorted(missing.items()):
            _log.warning("%s: client %d %s", stage, client, why)


class _Stopwatch:
    """Adds up the computing time of calls: what the strategy costs, besides Flower's own work."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        """The same function, on the watch."""

        def timed(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            begun = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - begun

        return timed
