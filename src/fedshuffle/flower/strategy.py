"""The server's side: a strategy that samples, sends orders, and aggregates by our own rules."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedshuffle import methods, sampling
from fedshuffle._arrays import FloatArray, count, number, positive
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.flower.model import Model
from fedshuffle.flower.roster import Roster
from fedshuffle.flower.session import Session, Terms
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.methods.averaging import (
    InclusionProbability,
    objective_weight,
    own_steps,
    weight_per_share_done,
)
from fedshuffle.rounds import Run
from fedshuffle.runs import FACTS, RunFolder
from fedshuffle.sampling import Optimal, Sampling
from fedshuffle.schedules import Schedule

_log = logging.getLogger("flwr.fedshuffle")

_BY_SIZE = ("importance", "one", "ais", "stratified")
EvaluateOnServer = Callable[[int, ArrayRecord], MetricRecord | None]


@final
class FedShuffleStrategy(Strategy):  # type: ignore[misc]  # Flower is untyped here
    r"""Any method of this library without client state, on Flower's clients.

    The server samples clients by number, sends each its own order (step size, steps, seed), and
    moves the model by :math:`\sum_i a_i (y_i - x)` over those who answered, with the method's own
    weights: for FedShuffle :math:`a_i = w_i / (p_i r_i)`, where :math:`p_i` is the probability that
    client i is sampled and :math:`r_i` that it answers when asked. Nothing is divided by the sum
    over whoever answered, unless the method itself does so, as FedAvg. The same seed gives the same
    trajectory as in the simulator.

    Args:
        clients: how many there are in all; they are numbered from 0 on.
        method: as for :func:`fedshuffle.train`; one without client state. By default FedShuffle
            with the rule that makes up for unfinished work.
        sampling: as for :func:`fedshuffle.train`.
        work: what a sampled client does.
        step_size: that of the client with the most local steps; of an epoch, if sizes are withheld.
        server_step_size: by what the aggregated update is multiplied.
        seed: everything random follows from it.
        sizes: the clients' numbers of examples; ``"asked"`` waits for all clients to say it;
            ``"withheld"`` does without, for methods that can.
        weights: of the objective; by size, or equal if sizes are withheld.
        answers: the dropout model: the probability that a client answers when asked, ``retries``
            included, one for all or one each, independently of its data and of all else. With 1, a
            round in which somebody does not answer is biased, and is logged as such.
        timeout: seconds to wait for the answers to one exchange, and for clients at the start.
        retries: how often a client that fails or is away is asked again before time is up.
        out: a folder for metrics and checkpoints (see :mod:`fedshuffle.runs`).
        resume: go on with the run in ``out``.
        checkpoint_every: save after so many rounds, and after the last.
        keep: how many checkpoints to keep.
        evaluate_every: ask all connected clients to evaluate the model after so many rounds.
        nodes: which client each of Flower's nodes is. By default every node is asked, and believed
            as long as no other node says the same.

    >>> strategy = FedShuffleStrategy(clients=3, sampling="uniform:2", step_size=0.1)
    """

    def __init__(
        self,
        clients: int | None = None,
        method: str | Method = "fedshuffle-gen",
        sampling: str | Sampling = "full",
        work: LocalWork | None = None,
        step_size: Schedule = 0.1,
        server_step_size: Schedule = 1.0,
        seed: int = 0,
        *,
        sizes: Sequence[int] | Literal["asked", "withheld"] = "asked",
        weights: Sequence[float] | None = None,
        answers: float | Sequence[float] = 1.0,
        timeout: float = 600.0,
        retries: int = 0,
        out: Path | str | None = None,
        resume: bool = False,
        checkpoint_every: int = 1,
        keep: int = 3,
        evaluate_every: int | None = None,
        nodes: Mapping[int, int] | None = None,
    ) -> None:
        self.method = methods.get(method)
        self.work = LocalWork() if work is None else work
        self.sampling = sampling
        self.step_size = step_size
        self.server_step_size = server_step_size
        self.seed = seed
        self.sizes = sizes
        self.weights = weights
        self.clients = _population(clients, sizes)
        self.answers = _probabilities(answers, self.clients)
        self.timeout = _seconds(timeout)
        self.retries = 0 if retries == 0 else count(retries, "retries")
        self.checkpoint_every = count(checkpoint_every, "checkpoint_every")
        self.evaluate_every = evaluate_every and count(evaluate_every, "evaluate_every")
        self.nodes = nodes
        self.resume = resume
        self.folder: RunFolder | None = None
        if out is not None:
            again = f"start again with out={str(out)!r}, resume=True"
            self.folder = RunFolder(Path(out), count(keep, "keep"), again)
        elif resume:
            raise FedShuffleError("resume=True needs the folder of the run: give it as out.")
        _check_nodes(nodes or {}, self.clients)
        _check(self.method, self.work, self.sampling, self.withheld)
        self._run()  # what is wrong with the settings is said now
        self._session: Session | None = None

    @property
    def asked(self) -> bool:
        """Whether clients are asked for their sizes."""
        return isinstance(self.sizes, str) and self.sizes == "asked"

    @property
    def withheld(self) -> bool:
        """Whether clients keep their sizes to themselves."""
        return isinstance(self.sizes, str) and self.sizes == "withheld"

    # Flower's interface --------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateOnServer | None = None,
    ) -> Result:
        """Run all rounds, or those that are left of a run that goes on.

        Args:
            grid: Flower's.
            initial_arrays: such as ``ArrayRecord(model.state_dict())``.
            num_rounds: how many rounds in all.
            timeout: seconds to wait for one exchange, if not the strategy's own.
            train_config: not used: what clients need to know stands in their orders.
            evaluate_config: not used.
            evaluate_fn: called with the round and the arrays before the first round and after each.
        """
        rounds = count(num_rounds, "num_rounds")
        if timeout is not None:
            self.timeout = _seconds(timeout)
        with self.folder.writing() if self.folder else nullcontext():
            return self._rounds(grid, initial_arrays, rounds, evaluate_fn)

    def _rounds(
        self, grid: Grid, arrays: ArrayRecord, rounds: int, evaluate_fn: EvaluateOnServer | None
    ) -> Result:
        """All rounds, or those that are left."""
        session = self._begin(grid, arrays, rounds)
        self.summary()
        result = Result(arrays=session.arrays())
        if evaluate_fn and session.state.round == 0:
            _keep(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, result.arrays))
        saved = session.state.round
        try:
            while session.state.round < rounds:
                record = session.play(grid)
                now = session.state.round
                result.arrays = session.arrays()
                result.train_metrics_clientapp[now] = _metrics(record)
                try:
                    if self.evaluate_every and (now % self.evaluate_every == 0 or now == rounds):
                        found = session.evaluate(grid)
                        _keep(result.evaluate_metrics_clientapp, now, found)
                        record |= _named(found, record, "clients_")
                    if evaluate_fn:
                        found = evaluate_fn(now, result.arrays)
                        _keep(result.evaluate_metrics_serverapp, now, found)
                        record |= _named(found, record)
                finally:  # the round is done, whatever its evaluation does
                    if self.folder:
                        self.folder.record(record)
                if self.folder and (now == rounds or now % self.checkpoint_every == 0):
                    self.folder.save(session.state)
                    saved = now
        except BaseException:
            if self.folder and session.state.round > saved:
                self.folder.save(session.state)
            raise
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The orders of the next round, for a loop of one's own; probes are sent from here."""
        if self.folder:
            raise FedShuffleError("metrics and checkpoints are written by start: leave out out.")
        if self.retries:
            raise FedShuffleError("clients are asked again by start: leave out retries.")
        if self._session is None or server_round == 1:
            self._session = self._begin(grid, arrays, server_round)
        return self._session.orders(grid, arrays, server_round - 1)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The model after the round that :meth:`configure_train` began."""
        if self._session is None:
            raise FedShuffleError("nobody was asked yet: call configure_train first.")
        record = self._session.aggregate(replies)
        return self._session.arrays(), _metrics(record)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: :meth:`start` asks for evaluations itself (``evaluate_every``)."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Nothing."""
        return None

    def summary(self) -> None:
        """Log what is about to run."""
        _log.info(
            "%s over %d clients, sampling %s, seed %d%s",
            self.method.name,
            self.clients,
            self.sampling,
            self.seed,
            "" if self.answers.min() == 1 else f"; answers {self.answers.min():g} and more",
        )
        if self.answers.min() == 1:
            return
        if not isinstance(self.method.averaging.normaliser, InclusionProbability):
            _log.warning(
                "%s does not go by the probability that a client takes part, so clients that drop"
                " out bias its mean round. Use fedshuffle-gen (or NAME+fedshuffle-gen).",
                self.method.name,
            )
        if self.method.direction.needs_joint:
            _log.warning(
                "The mean round of %s is biased if clients drop out: those that walk are among"
                " those whose gradients steer. Its estimate of the gradient is not.",
                self.method.name,
            )

    # ---------------------------------------------------------------------------------------------

    def _begin(self, grid: Grid, arrays: ArrayRecord, rounds: int) -> Session:
        """Meet the clients, and take up the state to start from."""
        if self.folder:
            self.folder.check(self.resume)  # before anybody is waited for
        roster = Roster(self.clients, self.timeout, self.nodes)
        roster.wait_for(grid, self.clients if self.asked else 1)
        run = self._run(roster)
        hello = next(iter(roster.hellos.values()))
        model = Model(arrays, hello.parameters, hello.dtype, hello.tied, hello.frozen)
        state = run.start(model.flat(arrays))
        if self.folder:
            begun_with = self.folder.settings()["rounds"] if self.resume else rounds
            settings = {
                **run.settings(begun_with),
                "engine": "flower",
                "parameters": len(state.x),
                "dtype": str(model.dtype),
                "model_sha256": model.digest(),
                "frozen_sha256": hashlib.sha256(json.dumps(hello.frozen).encode()).hexdigest(),
                "answers_sha256": hashlib.sha256(self.answers.tobytes()).hexdigest(),
                "rounds": rounds,
            }
            state = self.folder.begin(settings, state, self.resume)
        terms = Terms(self.answers, self.withheld, self.timeout, self.retries)
        self._session = Session(run, roster, model, state, terms)
        return self._session

    def _run(self, roster: Roster | None = None) -> Run:
        sizes: Any = self.sizes
        if self.asked and roster is not None:
            sizes = roster.sizes()
        elif isinstance(sizes, str):  # as if everybody had one minibatch: a step is then an epoch
            sizes = np.ones(self.clients, np.int64)
        return Run(
            Federation.from_sizes(sizes, self.weights),
            self.method,
            self.sampling,
            self.work,
            self.step_size,
            self.server_step_size,
            self.seed,
        )


def _check(method: Method, work: LocalWork, drawn: str | Sampling, withheld: bool) -> None:
    """Refuse what cannot be done with real clients, before any of them is asked."""
    if isinstance(drawn, str):
        sampling.check(drawn)
    if isinstance(drawn, Optimal) or (isinstance(drawn, str) and drawn.startswith("optimal")):
        raise FedShuffleError(
            "optimal client sampling asks for norms first and updates later, which takes two"
            " exchanges here and saves nothing. Use another sampling."
        )
    if method.direction.client_state or method.pooled:
        why = "has all data in one place" if method.pooled else "keeps a vector for every client"
        raise FedShuffleError(
            f"{method.name} {why}, which the strategy does not offer. Use fedshuffle-gen, or"
            " fedshuffle-mvr+fedshuffle-gen."
        )
    if work.interruption is not None:
        raise FedShuffleError(
            "real clients say themselves how much they did: leave work.interruption out, and limit"
            " the time on the client (client_app(seconds=...))."
        )
    if not withheld:
        return
    if method.local_work(work).steps is not None:
        raise FedShuffleError('with sizes="withheld" the local work is said in epochs, not steps.')
    if isinstance(drawn, str) and drawn.split(":")[0].strip() in _BY_SIZE:
        raise FedShuffleError(
            f'sampling {drawn!r} goes by size, and sizes are "withheld". Use full, uniform:B or'
            " independent:p1,p2,..."
        )
    rules = method.averaging
    if rules.step_normalisation is not own_steps or rules.weight not in (
        objective_weight,
        weight_per_share_done,
    ):
        raise FedShuffleError(
            f"{method.name} needs the clients' numbers of steps, which follow from their sizes. Use"
            " fedshuffle (or NAME+fedshuffle), whose clients can scale their steps themselves."
        )


def _check_nodes(nodes: Mapping[int, int], clients: int) -> None:
    if not all(isinstance(n, int | np.integer) for pair in nodes.items() for n in pair):
        raise FedShuffleError("nodes says which client each node is: nodes={NODE_ID: 0, ...}.")
    given = sorted(nodes.values())
    for client, following in zip(given, [*given[1:], -1]):
        if not 0 <= client < clients:
            raise FedShuffleError(
                f"nodes has client {client}, but there are clients 0 to {clients - 1} only."
            )
        if client == following:
            raise FedShuffleError(f"nodes has two nodes for client {client}: give each its own.")


def _population(clients: int | None, sizes: Sequence[int] | str) -> int:
    if isinstance(sizes, str):
        if sizes not in ("asked", "withheld"):
            raise unknown("sizes", sizes, ["asked", "withheld"])
        if clients is None:
            raise FedShuffleError("say how many clients there are in all: clients=100.")
        return count(clients, "clients")
    if clients is not None and clients != len(sizes):
        raise FedShuffleError(f"there are {clients} clients, but {len(sizes)} sizes.")
    return count(len(sizes), "the number of sizes")


def _probabilities(answers: float | Sequence[float], clients: int) -> FloatArray:
    given = np.full(clients, answers) if np.ndim(answers) == 0 else answers
    found = positive(given, clients, "answers")
    if found.max() > 1:
        raise FedShuffleError(f"answers has {found.max():g}, but probabilities are at most 1.")
    return found


def _seconds(timeout: float) -> float:
    if not 0 < number(timeout, "timeout") < math.inf:
        raise FedShuffleError(f"timeout is {timeout}: give a positive number of seconds.")
    return float(timeout)


def _metrics(record: Mapping[str, Any]) -> MetricRecord:
    """What Flower can show of a record."""
    names = ("clients", "answered", "steps", "seconds", "server_seconds")
    numbers = {name.replace("_", "-"): record[name] for name in names}
    return MetricRecord(numbers | {"as-stated": int(record["as_stated"])})


def _named(
    found: MetricRecord | None, taken: Mapping[str, Any], prefix: str = ""
) -> dict[str, float]:
    """Metrics for the history; those whose name is taken get another."""
    plain = {prefix + k: float(v) for k, v in (found or {}).items() if isinstance(v, int | float)}
    return {
        f"evaluated_{k}" if k in taken or k in FACTS else k: v if math.isfinite(v) else math.nan
        for k, v in plain.items()
    }


def _keep(where: dict[int, MetricRecord], round: int, found: MetricRecord | None) -> None:
    if found is not None:
        where[round] = found
        _log.info("round %d: %s", round, dict(found))
