"""The server's side: a strategy that samples clients, sends tasks, and aggregates their updates."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import ArrayLike

from fedshuffle import fingerprint, methods
from fedshuffle._arrays import count, expect, number
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.flower import checks, stragglers
from fedshuffle.flower.client_registry import ClientRegistry
from fedshuffle.flower.secure_aggregation import SecureAggregation
from fedshuffle.flower.session import Model, Session
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.privacy import Privacy
from fedshuffle.probabilities import Estimate
from fedshuffle.probabilities.drift import drift_warning
from fedshuffle.sampling import Sampling
from fedshuffle.schedules import Schedule
from fedshuffle.timing import OverSelection, TrainingSchedule, Wait
from fedshuffle.training.monitoring import RECORD_KEYS
from fedshuffle.training.rounds import Run
from fedshuffle.training.run_folder import RunFolder
from fedshuffle.transforms import Channel, Transform

_log = logging.getLogger("flwr.fedshuffle")

EvaluateOnServer = Callable[[int, ArrayRecord], MetricRecord | None]


class FedShuffleStrategy(Strategy):  # type: ignore[misc]  # Flower is untyped here
    r"""The methods and transforms of this library on Flower's clients.

    The server samples clients by number, sends each its task (step size, steps, seed), and
    moves the model by :math:`\sum_i a_i (y_i - x)` over the clients that replied, with the method's
    weights: for FedShuffle :math:`a_i = w_i / (p_i r_i)`, where :math:`p_i` is the probability that
    client i is sampled and :math:`r_i` that it replies. Nothing is divided by the sum over the
    replies, unless the method itself does so, as FedAvg. The same seed gives the same trajectory
    as in the simulator.

    Args:
        clients: the number of clients; they are numbered from 0.
        method: as for :func:`fedshuffle.train`. By default FedShuffle corrected for unfinished
            work.
        sampling: as for :func:`fedshuffle.train`.
        work: what a sampled client does.
        step_size: that of the client with the most local steps; of an epoch, if sizes are withheld.
        server_step_size: factor of the aggregated update.
        seed: determines everything random.
        sizes: the clients' numbers of examples; ``"asked"`` waits until all clients have sent them;
            ``"withheld"`` needs none, for methods that do not depend on them.
        weights: of the objective; by size, or equal if sizes are withheld.
        response_probability: the dropout model: the probability that a client replies, ``retries``
            included, one for all or one each, independently of its data and of everything else.
            With 1, a round in which a client does not reply is biased, and is logged as such.
            ``"estimate"``, or another rule of :mod:`fedshuffle.probabilities`, estimates it for
            each client from who was asked and who replied so far; a client that is away does not
            reply. Checkpoints hold what estimates follow from.
        schedule: for whom a round waits: all (``"wait"``), those who reply in time
            (``"deadline:60"``, in seconds), or the first of more that are asked
            (``"over:8of10"``). Replies that come later are dropped, and ``response_probability`` is
            that of being in time.
        timeout: seconds to wait for the replies of one exchange, and for clients at the start.
        retries: how often a client that fails or is away is asked again before time is up.
        out: a folder for metrics and checkpoints.
        resume: resume the run in ``out``.
        checkpoint_every: rounds between checkpoints; the last round is always saved.
        keep: the number of checkpoints to keep.
        evaluate_every: rounds between evaluations by all connected clients.
        record_cohorts: whether records list the clients of the round; they follow from the seed.
        nodes: the client of each of Flower's nodes. By default every node is asked, and believed
            unless another node says the same.
        transforms, channel, privacy: what happens to updates on their way, as for
            :func:`fedshuffle.train`. The clients' part runs at the clients (see
            :func:`fedshuffle.flower.chain.register`).
        secure_aggregation: settings of secure aggregation, with which the server learns only the
            sum of the updates; the clients need ``client_app(..., secure_aggregation=True)``.

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
        response_probability: float | Sequence[float] | str | Estimate = 1.0,
        schedule: str | TrainingSchedule = "wait",
        timeout: float = 600.0,
        retries: int = 0,
        out: Path | str | None = None,
        resume: bool = False,
        checkpoint_every: int = 1,
        keep: int = 3,
        evaluate_every: int | None = None,
        record_cohorts: bool = False,
        nodes: Mapping[int, int] | None = None,
        transforms: Sequence[Transform] = (),
        channel: str | Channel | None = None,
        privacy: Privacy | None = None,
        secure_aggregation: SecureAggregation | None = None,
    ) -> None:
        self.clients = checks.population(clients, sizes)
        self.method = methods.get(method)
        self.schedule = stragglers.synchronous(schedule)
        sampling = stragglers.asked(self.schedule, sampling, self.clients)
        self.sampling, self.seed = sampling, seed
        self.asked = isinstance(sizes, str) and sizes == "asked"
        self.withheld = isinstance(sizes, str) and sizes == "withheld"
        # Without sizes as if everybody had one minibatch: a step is then an epoch.
        self.sizes: ArrayLike = np.ones(self.clients, int) if isinstance(sizes, str) else sizes
        self.weights = weights
        self.response_probability, self.response_estimate = checks.response_probability(
            response_probability, self.clients
        )
        certain = self.response_estimate is None and bool((self.response_probability == 1).all())
        self.favours_fast = certain and not isinstance(self.schedule, Wait)
        """Whether nothing corrects for clients that are slow."""
        if certain and isinstance(self.schedule, OverSelection):
            share = self.schedule.keep / self.schedule.ask
            self.response_probability = np.full(self.clients, share)
        self.timeout = number(timeout, "timeout", within="(0, inf)")
        self.retries = 0 if retries == 0 else count(retries, "retries")
        self.checkpoint_every = count(checkpoint_every, "checkpoint_every")
        self.evaluate_every = evaluate_every and count(evaluate_every, "evaluate_every")
        self.record_cohorts = record_cohorts
        self.nodes, self.resume = nodes, resume
        self.folder: RunFolder | None = None
        if out is not None:
            again = f"start again with out={str(out)!r}, resume=True"
            self.folder = RunFolder(Path(out), count(keep, "keep"), again)
        elif resume:
            raise FedShuffleError("resume=True needs the folder of the run: give it as out.")
        work = LocalWork() if work is None else work
        checks.check_nodes(nodes or {}, self.clients)
        checks.check_settings(self.method, work, sampling, self.withheld)
        self.secure_aggregation = secure_aggregation
        self.privacy = privacy
        self._settings = (self.method, sampling, work, step_size, server_step_size, seed)
        self._on_the_way = tuple(transforms), channel
        run = self._run(self.sizes, rounds=1)  # fails now if the settings are wrong
        checks.check_transforms(run, resume)
        if secure_aggregation is not None:
            expect(secure_aggregation, SecureAggregation, "secure_aggregation")
            checks.check_secure(run, self.retries, self.response_probability)
        checks.check_schedule(run, self.schedule, secure_aggregation is not None)
        if self.response_estimate is not None:
            checks.check_estimated(run, secure_aggregation is not None)
        self._session: Session | None = None

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
        """Run all rounds, or the remaining ones of a resumed run.

        Args:
            grid: Flower's.
            initial_arrays: such as ``ArrayRecord(model.state_dict())``.
            num_rounds: the number of rounds in all.
            timeout: seconds to wait for one exchange, if not the strategy's own.
            train_config, evaluate_config: refused unless empty: the strategy itself tells clients
                what to do.
            evaluate_fn: called with the round and the arrays before the first round and after each.
        """
        rounds = count(num_rounds, "num_rounds")
        checks.check_config("train_config", train_config)
        checks.check_config("evaluate_config", evaluate_config)
        if timeout is not None:
            self.timeout = number(timeout, "timeout", within="(0, inf)")
        with self.folder.locked() if self.folder else nullcontext():
            session = self._begin(grid, initial_arrays, rounds)
            self.summary()
            result = Result(arrays=session.arrays())
            if evaluate_fn and session.state.round == 0:
                found = evaluate_fn(0, result.arrays)
                _add_metrics({"round": 0}, result.evaluate_metrics_serverapp, found)
            saved = session.state.round
            try:
                while session.state.round < rounds:
                    self._run_round(session, result, evaluate_fn, rounds)
                    if self.folder and session.state.round % self.checkpoint_every == 0:
                        self.folder.save(session.state)
                        saved = session.state.round
            finally:  # the last round, or where an error ends the run
                if self.folder and session.state.round > saved:
                    self.folder.save(session.state)
            _warn_of_drift(session)
        return result

    def _run_round(
        self, session: Session, result: Result, evaluate_fn: EvaluateOnServer | None, rounds: int
    ) -> None:
        record = session.run_round()
        now = session.state.round
        result.arrays = session.arrays()
        result.train_metrics_clientapp[now] = _metrics(record)
        try:
            if self.evaluate_every and (now % self.evaluate_every == 0 or now == rounds):
                found = session.evaluate()
                _add_metrics(record, result.evaluate_metrics_clientapp, found, "clients_")
            if evaluate_fn:
                found = evaluate_fn(now, result.arrays)
                _add_metrics(record, result.evaluate_metrics_serverapp, found)
        finally:  # the round is done, whatever its evaluation does
            if self.folder:
                self.folder.record(record)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse Flower's own loop, in which wrappers call this: :meth:`start` has its own."""
        raise FedShuffleError(
            "FedShuffleStrategy has rounds of its own, so no other strategy can wrap it: call its"
            " own start. For differential privacy it has privacy=..., and fedshuffle.audit says"
            " what it minimises."
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Nothing: :meth:`start` aggregates."""
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: :meth:`start` evaluates (``evaluate_every``)."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Nothing."""
        return None

    def summary(self) -> None:
        """Log what is about to run."""
        name, smallest = self.method.name, self.response_probability.min()
        settings = f"{name} over {self.clients} clients, sampling {self.sampling}, seed {self.seed}"
        if not isinstance(self.schedule, Wait):
            settings += f", schedule {self.schedule}"
        if self.response_estimate is not None:
            _log.info(f"{settings}; response probability by {self.response_estimate}")
        elif self.favours_fast:
            _log.info(settings)
            _log.warning(stragglers.slow_clients_count_less(self.schedule))
        elif smallest == 1:
            _log.info(settings)
            return
        else:
            _log.info(f"{settings}; response probability {smallest:g} and more")
        if not self.method.averaging.by_probability:
            _log.warning(
                f"{name} does not weight clients by inclusion probability, so clients that drop out"
                " bias its mean round. Use fedshuffle-gen (or NAME+fedshuffle-gen)."
            )
        if self.method.direction.needs_joint:
            _log.warning(
                f"The mean round of {name} is biased if clients drop out: clients that train are"
                " among those whose gradients it averages. Its gradient estimate is not biased."
            )

    def _begin(self, grid: Grid, arrays: ArrayRecord, rounds: int) -> Session:
        """Wait for the clients, and load the state to start from."""
        if self.folder:
            self.folder.check(self.resume)  # before waiting for clients
        registry = ClientRegistry(grid, self.clients, self.timeout, self.nodes)
        registry.wait_for(self.clients if self.asked else 1)
        first = self.folder.settings()["rounds"] if self.folder and self.resume else rounds
        run = self._run(registry.sizes() if self.asked else self.sizes, first)
        if run.mechanism is not None:
            _log.info(checks.cost(run.mechanism, rounds))
        info = next(iter(registry.infos.values()))
        if info.secure_aggregation != (self.secure_aggregation is not None):
            raise FedShuffleError(
                "the strategy and its clients do not agree on secure aggregation. Give both"
                " client_app(..., secure_aggregation=True) and"
                " FedShuffleStrategy(..., secure_aggregation=SecureAggregation(...)), or neither."
            )
        model = Model(arrays, info)
        x = model.flat(arrays)
        store = self.folder.client_store(len(x), x.dtype) if self.folder else None
        state, estimate = run.start(x, store), self.response_estimate
        if self.folder:
            settings = {
                **run.settings(first),
                "engine": "flower",
                "parameters": len(state.x),
                "dtype": str(model.dtype),
                "model_sha256": _sha256(json.dumps([model.trained, str(model.dtype)]).encode()),
                "frozen_sha256": _sha256(json.dumps(info.frozen).encode()),
                "schedule": None if isinstance(self.schedule, Wait) else str(self.schedule),
                "response_probability_sha256": _sha256(self.response_probability.tobytes()),
                "response_estimate": estimate and fingerprint.part(estimate),
                "rounds": rounds,
            }
            state = self.folder.begin(settings, state, self.resume)
        self._session = Session(self, grid, run, registry, model, state)
        return self._session

    def _run(self, sizes: ArrayLike, rounds: int) -> Run:
        transforms, channel = self._on_the_way
        return Run(
            Federation.from_sizes(sizes, self.weights),
            *self._settings,
            transforms=transforms,
            channel=channel,
            privacy=self.privacy,
            rounds=rounds,
            response_probability=self.response_probability,
        )


def _warn_of_drift(session: Session) -> None:
    if (past := session.replies) is None:
        return
    what = f"who replies changed over the {session.state.round} rounds"
    if said := drift_warning(past.estimate, past.drift(), what, "response_probability"):
        _log.warning(said)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _metrics(record: Mapping[str, Any]) -> MetricRecord:
    """What Flower can show of a record."""
    names = ("clients", "replied", "steps", "seconds")
    numbers = {name: record[name] for name in names}
    return MetricRecord(numbers | {"follows-dropout-model": int(record["follows_dropout_model"])})


def _add_metrics(
    record: dict[str, Any],
    results: dict[int, MetricRecord],
    found: MetricRecord | None,
    prefix: str = "",
) -> None:
    """Add the metrics of a round to its record, where a name may be taken, and to the results."""
    if found is None:
        return
    results[record["round"]] = found
    _log.info("round %d: %s", record["round"], dict(found))
    taken = {*record, *RECORD_KEYS}
    for name, value in found.items():
        if isinstance(value, int | float):
            key = f"evaluated_{prefix}{name}" if prefix + name in taken else prefix + name
            record[key] = float(value) if math.isfinite(value) else math.nan
