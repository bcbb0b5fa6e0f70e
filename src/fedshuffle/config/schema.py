"""The config of a run, as frozen dataclasses.

Each key of the file is one field here, and its docstring is what the reference says of it.
:mod:`fedshuffle.config.loader` reads, checks and writes files by the types of these fields.
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from fedshuffle import availability as availabilities
from fedshuffle import methods, schedules
from fedshuffle import probabilities as estimates
from fedshuffle._arrays import count
from fedshuffle.config import imports
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.local_work import LocalWork
from fedshuffle.privacy import Privacy
from fedshuffle.randomness import check_seed
from fedshuffle.schedules import Schedule
from fedshuffle.timing import clock_text, parse_schedule
from fedshuffle.timing.settings import check as check_timing
from fedshuffle.transforms import channels
from fedshuffle.tuning import DEFAULT_SHARE

if TYPE_CHECKING:
    from fedshuffle.config.runner import RunInputs
    from fedshuffle.training import Result
    from fedshuffle.tuning import TunedStepSizes


at = partial(error_context, catch=FedShuffleError)
"""``with at(key)``: put the key of the config before an error."""

Count = Annotated[int, count]
"""A whole number of at least 1."""


@dataclass(frozen=True)
class ImportSpec:
    """An object of the user's: an import path ``package.module:attribute``, and arguments.

    >>> ImportSpec("torch.nn:Linear", {"in_features": 64, "out_features": 10}).path
    'torch.nn:Linear'
    """

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StorePath:
    """A federation stored in a folder, and the import path of a transform of its examples.

    >>> StorePath("stores/clinics").path
    'stores/clinics'
    """

    path: str
    transform: str | None = None


DataSpec = ImportSpec | StorePath


@dataclass(frozen=True)
class ScheduleSpec:
    """A step size that depends on the round: a function of :mod:`fedshuffle.schedules`.

    >>> ScheduleSpec("cosine", {"step_size": 0.1}).name
    'cosine'
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


StepSize = float | ScheduleSpec


def step_size_by_round(size: StepSize, rounds: int) -> Schedule:
    """A step size as a number, or as a function of the round in a run of this many rounds."""
    if not isinstance(size, ScheduleSpec):
        return size
    return schedules.make(size.name, size.arguments, rounds)


@dataclass(frozen=True)
class EvaluationSpec:
    """The data, metrics and frequency of evaluation.

    >>> EvaluationSpec(StorePath("stores/held-out"), every=5).metrics
    ('loss', 'accuracy')
    """

    data: DataSpec | Literal["training"] = field(
        metadata={"add": 'held-out data as in [data], or data = "training"'}
    )
    """The data to evaluate on, as in ``[data]``, or ``"training"`` for the training data."""
    metrics: tuple[str, ...] = ("loss", "accuracy")
    """Also ``"top-5"``, ``"perplexity"`` and other names of ``Evaluation``, or import paths of
    a ``Metric``.
    """
    every: Count = 1
    """Rounds between evaluations; the last round is always evaluated."""
    per_client: bool = True
    """Whether to report the mean over clients, and over the worst tenth of them, as well."""
    batch_size: Count = 1024
    """Examples per batch; it changes the speed, not the result."""
    clients: Count | None = None
    """The number of clients to evaluate, drawn once; by default all."""
    training: Count | None = None
    """Also evaluate ``training_loss`` on the training data of this many clients, drawn once."""


@dataclass(frozen=True)
class Checkpoints:
    """How often the state is saved, and how many checkpoints are kept.

    >>> Checkpoints(every=50)
    Checkpoints(every=50, keep=3)
    """

    every: Count = 10
    """Rounds between checkpoints; the last round is always saved."""
    keep: Count = 3
    """The number of checkpoints to keep."""


@dataclass(frozen=True)
class Config:
    """The config of one run. Vary it with :func:`dataclasses.replace` or :meth:`override`.

    >>> model, loss = ImportSpec("a:model"), ImportSpec("a:loss")
    >>> config = Config(rounds=3, model=model, loss=loss, data=StorePath("a"))
    >>> config.override({"work.batch_size": 16}).work.batch_size
    16
    """

    rounds: Count = field(metadata={"add": "the number of rounds, such as rounds = 100"})
    """The number of rounds in all."""
    model: ImportSpec = field(metadata={"add": 'a section [model] with use = "module:function"'})
    """A function that returns the torch module; the other keys of ``[model]`` are its arguments."""
    loss: ImportSpec = field(
        metadata={"add": 'loss = "cross_entropy", another of fedshuffle.losses, or an import path'}
    )
    """A name of ``fedshuffle.losses``, or a function ``loss(model, *fields)`` of yours."""
    data: DataSpec = field(
        metadata={"add": 'a section [data] with use = "module:function" or store = "folder"'}
    )
    """A function that returns the ``Federation``; the other keys of ``[data]`` are its arguments.
    Or ``store = "folder"``: a federation that was imported, and perhaps ``transform =
    "module:function"``, which its minibatches pass through.
    """
    seed: int = 0
    """The seed of everything random, also of the initial model."""
    method: str = "fedshuffle"
    """The method, as ``fedshuffle methods`` lists them, or ``"module:attribute"``: your own."""
    momentum: str | None = None
    """``"mvr:0.1"``, ``"global:0.1"`` or ``"none"``; by default that of the method."""
    sampling: str = "full"
    """Who takes part, such as ``"uniform:10"``, or ``"module:function"``, which takes the
    federation.
    """
    availability: str | None = None
    """Who is there to be sampled, such as ``"markov:on=0.1,off=0.2"`` or ``"trace:week.csv"``; by
    default everybody.
    """
    schedule: str = "wait"
    """For whom the server waits: ``"wait"`` for the whole cohort, ``"deadline:60"``,
    ``"over:8of10"``, ``"fedbuff:K=10,C=100"`` and others; all but the first need a ``clock``.
    """
    clock: str | None = None
    """How long clients take, such as ``"lognormal:0.1:1"`` seconds per local step or
    ``"table:devices.csv"``; by default time does not matter.
    """
    probabilities: str | None = None
    """``"estimate"``, ``"estimate:fedau:50"`` and others estimate inclusion probabilities from who
    took part so far; by default they are known.
    """
    step_size: StepSize = 0.1
    """The local step size of the client with the most local steps."""
    server_step_size: StepSize = 1.0
    """Multiplies the aggregated update."""
    work: LocalWork = field(default_factory=LocalWork)
    """The local work of a sampled client."""
    transforms: tuple[ImportSpec, ...] = ()
    """Your own transforms of updates: classes, or functions that return a ``Transform``."""
    channel: str = "none"
    """How updates are compressed, such as ``"topk:0.01+ef"`` or ``"qsgd:4"``."""
    down_channel: str = "none"
    """How the model is compressed on its way to clients."""
    privacy: Privacy | None = None
    """Differential privacy of whole clients; without this section nothing is private."""
    engine: str = "sequential"
    """What computes local updates: ``"auto"`` tries several, ``"ray:4"`` uses a Ray cluster."""
    device: str | None = None
    """``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"mps"``; by default that of the model."""
    evaluation: EvaluationSpec | None = None
    """What is evaluated, and how often; without this section nothing is."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    """How often the state is saved."""
    tensorboard: bool = False
    """Whether to write the metrics for TensorBoard as well."""
    record_cohorts: bool = False
    """Whether the record of a round lists its clients."""
    record_clients: bool = False
    """Whether the record of a round has the metrics of each of its clients."""
    out: Path | None = None
    """The folder of the run, if ``--out`` does not give one."""
    folder: Path = field(default_factory=Path.cwd)
    """The root of imports and relative paths; by default the folder of the file."""
    origin: tuple[str, ...] = field(default=(), compare=False, metadata={"key": False})
    """The file and the overrides it was made from; only for the record."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).resolve())
        count(self.rounds, "rounds")
        check_seed(self.seed)
        if not methods.is_import_path(self.method):
            methods.get(self.method)
        if self.momentum is not None:
            methods.parse_momentum(self.momentum)
        if self.availability is not None:
            with at("availability"):
                availabilities.check(self.availability)
        with at("schedule"):
            check_timing(parse_schedule(self.schedule), self.clock)
        if self.clock is not None:
            with at("clock"):
                clock_text.check(self.clock)
        if self.probabilities is not None:
            with at("probabilities"):
                estimates.parse(self.probabilities)
        with at("channel"):
            channels.channel(self.channel)
        with at("down_channel"):
            channels.down_link(self.down_channel)
        for name in ("step_size", "server_step_size"):
            with error_context(name):
                schedule = step_size_by_round(getattr(self, name), self.rounds)
                schedules.describe(schedule, self.rounds, name.replace("_", " "))

    def override(self, changes: Mapping[str, Any]) -> "Config":
        """This config with other values at dotted keys, written as in a file."""
        from fedshuffle.config.loader import override, read
        from fedshuffle.config.writer import plain

        notes = tuple(f"With {key} = {value}." for key, value in changes.items())
        changed = read(override(plain(self), changes), self.folder)
        return replace(changed, origin=self.origin + notes)

    def pinned(self) -> "Config":
        """This config with schedules and drifts that stay the same if there are more rounds."""
        pinned: dict[str, Any] = {}
        if self.availability is not None:
            pinned["availability"] = availabilities.pinned(self.availability, self.rounds)
        for name in ("step_size", "server_step_size"):
            size = getattr(self, name)
            if isinstance(size, ScheduleSpec) and "rounds" in schedules.parameters(size.name):
                pinned[name] = replace(size, arguments={"rounds": self.rounds, **size.arguments})
        return replace(self, **pinned)

    def importable(self) -> AbstractContextManager[None]:
        """Within this context the user's modules are imported once, also for several runs."""
        return imports.importable(self.folder)

    def inputs(self) -> "RunInputs":
        """The data, loss and evaluation, to be shared by runs that vary other settings."""
        from fedshuffle.config import runner

        return runner.inputs(self)

    def run(
        self,
        out: Path | str | None = None,
        *,
        progress: bool = False,
        inputs: "RunInputs | None" = None,
        address: str | None = None,
    ) -> "Result":
        """Train as the config says.

        Args:
            out: a folder for the config, metrics, checkpoints and the final model; by default
                that of the config.
            progress: whether to show a bar.
            inputs: the result of :meth:`inputs`, to share it between runs.
            address: the Ray cluster, if the engine works on one; it does not change the result.
        """
        from fedshuffle.config import runner

        return runner.run(self, out or self.out, progress, inputs, address)

    def tune(
        self,
        out: Path | str | None = None,
        *,
        share: float = DEFAULT_SHARE,
        progress: bool = False,
        inputs: "RunInputs | None" = None,
        address: str | None = None,
    ) -> "TunedStepSizes":
        """Find step sizes for this run by short runs: see :func:`fedshuffle.tune`.

        Args:
            out: a folder in which finished short runs are noted, such as that of the run; by
                default that of the config.
            share: the largest cost, as a share of the rounds of this run.
            progress: whether to show a bar.
            inputs: the result of :meth:`inputs`, to share it between runs.
            address: the Ray cluster, if the engine works on one.
        """
        from fedshuffle.config import runner

        return runner.tune(self, out or self.out, share, progress, inputs, address)

    def tuned(self, found: "TunedStepSizes") -> "Config":
        """This config with the step sizes that were found, in its own schedules."""
        note = (
            f"Tuned: step_size {found.step_size:g} and server_step_size"
            f" {found.server_step_size:g} cost {found.rounds_spent} rounds."
        )
        return replace(
            self,
            step_size=resized(self.step_size, found.step_size),
            server_step_size=resized(self.server_step_size, found.server_step_size),
            origin=(*self.origin, note),
        )


def resized(size: StepSize, to: float) -> StepSize:
    """Another step size, or the same schedule from there."""
    if not isinstance(size, ScheduleSpec):
        return to
    return replace(size, arguments={**size.arguments, "step_size": to})


def keys(kind: Any) -> dict[str, Any]:
    """The keys of a table in the file, with their types; a key that may be left out has no None."""
    hints = get_type_hints(kind, include_extras=True)
    names = [f.name for f in dataclasses.fields(kind) if f.metadata.get("key", True)]
    return {name: without_none(hints[name]) for name in names}


def without_none(hint: Any) -> Any:
    """The type of a value that is not None."""
    if NoneType not in get_args(hint):
        return hint
    return functools.reduce(operator.or_, [arm for arm in get_args(hint) if arm is not NoneType])
