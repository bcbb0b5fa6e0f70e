"""The comparison that a file describes, and the runs that follow from it."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from fedshuffle._arrays import count, number
from fedshuffle._files import results_folder
from fedshuffle.comparison.variants import SHORT, Entry, Variant, check_distinct, check_names
from fedshuffle.config import Config, EvaluationSpec, ScheduleSpec, loader, writer
from fedshuffle.config.schema import Count, DataSpec, StepSize, at, resized
from fedshuffle.errors import FedShuffleError, check_known
from fedshuffle.methods import Method
from fedshuffle.randomness import check_seed
from fedshuffle.tuning.search import Axis, Choices, Lattice

if TYPE_CHECKING:
    from fedshuffle.comparison.results import Results

CLIENTS = 100  # on which tuning evaluates the training loss

Clip = Annotated[float, lambda x, key: math.inf if x == "none" else loader.read_number(x, key)]


class Criterion(NamedTuple):
    """A metric to rank by, and whether a higher value is better."""

    metric: str
    higher_is_better: bool


@dataclass(frozen=True)
class GridPoint:
    """One point of the grid that tuning searches.

    >>> GridPoint(step_size=0.1, server_step_size=1.0, weight_decay=0.0, clip=5.0).step_size
    0.1
    """

    step_size: float
    server_step_size: float
    weight_decay: float
    clip: float


@dataclass(frozen=True)
class Tuning:
    """The short runs that choose a point of the grid for each method: ``[compare.tune]``.

    >>> Tuning(rounds=40).metric
    'loss'
    """

    rounds: Count | None = None
    """The rounds of a short run; by default a fifth of the run's."""
    seed: int | None = None
    """The seed of the short runs; by default the first of the comparison."""
    repeats: Count = 1
    """Short runs per point, with this seed and those after it. A point counts by their mean, and
    as diverged if one of them diverges.
    """
    metric: str = "loss"
    """A name of ``fedshuffle.Evaluation``, or the import path of a ``Metric``."""
    data: DataSpec | Literal["training"] = "training"
    """The data to tune on: ``"training"``, or validation data as in ``[data]``."""
    clients: Count | None = None
    """The number of clients to evaluate; by default 100 for training data, all for other data."""
    every: Count | None = None
    """Rounds between evaluations; by default a tenth of the rounds."""
    widen: float = 1000.0
    """The grid grows by at most this factor beyond either end; 1 keeps it as it is."""
    search: Literal["grid", "descent"] = "grid"
    """``"grid"`` tries every point of the grid, ``"descent"`` starts in its middle; both then try
    the neighbours of the best point, until it is better than all of them.
    """

    def __post_init__(self) -> None:
        number(self.widen, "widen", within="[1, 1e9]")
        check_known("search", self.search, ("grid", "descent"))
        if self.seed is not None:
            check_seed(self.seed)


@dataclass(eq=False)
class Trial:
    """One run of a comparison, in the folder of its name, and how it ended."""

    name: str
    config: Config
    point: GridPoint
    outcome: str = ""  # `finished`, `diverged` or `failed` once it has ended
    reason: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)  # its evaluations
    small: dict[str, float] = field(default_factory=dict)  # metrics of the smallest clients


@dataclass(frozen=True)
class Comparison:
    """Methods with and without momentum, over seeds, each at the grid point that suits it best.

    The fields from ``methods`` to ``tune`` are the keys of the section ``[compare]``.

        >>> from fedshuffle.config import ImportSpec, StorePath
        >>> model, loss, data = ImportSpec("mine:net"), ImportSpec("cross_entropy"), StorePath("a")
        >>> base = Config(100, model, loss, data, evaluation=EvaluationSpec(StorePath("b")))
        >>> compared = Comparison(base, methods=("fedavg-rr", "fedshuffle"), step_sizes=(0.1, 1.0))
        >>> [variant.name for variant in compared.variants]
        ['fedavg-rr', 'fedshuffle']
    """

    base: Config = field(metadata={"key": False})
    """The run that all others are variations of."""
    methods: tuple[Entry, ...] = field(
        metadata={"add": 'the methods to compare, such as ["fedavg-rr", "fedshuffle"]'}
    )
    """The methods to compare, by name or import path. An entry may also be a table with a ``name``,
    a ``method`` and its own ``sampling``, ``availability``, ``probabilities``, ``schedule``,
    ``clock``, ``work``, ``channel``, ``down_channel`` or step sizes.
    """
    momentum: tuple[str | None, ...] = (None,)
    """Each method is run with each of them; by default that of the run."""
    seeds: tuple[int, ...] = (0,)
    """The seeds of the full runs; by default that of the run."""
    step_sizes: tuple[float, ...] = ()
    """Each method gets the best of them; by default that of the run."""
    server_step_sizes: tuple[float, ...] = ()
    """Part of the grid, if given: each method gets the best of both step sizes."""
    common_step_sizes: tuple[float, ...] = ()
    """All methods are run at each of these as well."""
    weight_decay: tuple[float, ...] = ()
    """Part of the grid, if given."""
    clip: tuple[Clip, ...] = ()
    """Part of the grid, if given; ``"none"`` for no clipping."""
    metric: str | None = None
    """The metric to rank by; by default the accuracy, or else the first metric."""
    title: str = "Comparison"
    """The title of the report."""
    tune: Tuning = field(default_factory=Tuning)
    """The short runs that choose a point of the grid."""
    text: str = field(default="", compare=False, metadata={"key": False})
    """The file."""
    tables: dict[str, Any] = field(default_factory=dict, compare=False, metadata={"key": False})
    """The file as plain data, with overrides."""

    def __post_init__(self) -> None:
        if self.base.evaluation is None:
            raise FedShuffleError(
                "evaluation is missing: add a section [evaluation] with a metric to compare."
            )
        if self.tune.data != "training" and self.tune.data == self.base.evaluation.data:
            raise FedShuffleError(
                "compare.tune.data is the data of [evaluation]: settings would be chosen by what is"
                " reported. Give other data, or leave it out to tune on training data."
            )
        for name, values in vars(self).items():
            if isinstance(values, tuple) and name != "methods":
                check_distinct(values, f"compare.{name}")
        for key, name in {"momentum": "momentum", "seeds": "seed"}.items():
            for value in getattr(self, key):
                with at(f"compare.{key}"):
                    replace(self.base, **{name: value})
        if not self.step_sizes and not self.common_step_sizes:
            raise FedShuffleError("there is no step size to run: give compare.step_sizes.")
        check_names(self.variants)
        for variant in self.variants:
            points = self._points(variant)
            with at(variant.place if variant.grid else "compare"):
                for point in points:
                    self.trial(variant, point, None)

    def check_work(self, variant: Variant, method: Method) -> None:
        """Refuse a method that fixes a part of the local work which this comparison sets otherwise.

        A part that is not set is left to each method.
        """
        with at("compare.methods"):
            for point in self._points(variant):
                method.local_work(self.trial(variant, point, None).config.work)
            for name in method.work.keys() & set(_WORK):
                if set(self._varied(variant, name)) - {method.work[name]}:  # also the default
                    raise FedShuffleError(
                        f"{method.name} needs {name} = {method.work[name]!r}, so it cannot vary."
                        f" Leave compare.{name} out, or choose another method."
                    )

    @functools.cached_property
    def variants(self) -> list[Variant]:
        """Every method with every momentum."""
        entries = [Variant(one) if isinstance(one, str) else one for one in self.methods]
        return [replace(entry, momentum=one) for entry in entries for one in self.momentum]

    @functools.cached_property
    def _configs(self) -> dict[Variant, Config]:
        found = {}
        for variant in self.variants:
            with at(variant.place):
                run = replace(self.base, method=variant.method, momentum=variant.momentum, out=None)
                found[variant] = run.override(dict(variant.changes)) if variant.changes else run
        return found

    def config(self, variant: Variant) -> Config:
        """The run of a variant, but for its step sizes and its seed."""
        return self._configs[variant]

    def _varied(self, variant: Variant, name: str) -> tuple[float, ...]:
        """The values of a setting that the search of a variant tries; none if it is as in its run.

        What a variant sets itself comes before what the comparison varies.
        """
        own = dict(variant.grid).get(name, ())
        fixed = f"work.{name}" in dict(variant.changes)
        return tuple(map(float, () if fixed else own or getattr(self, name)))

    def lattice(self, variant: Variant) -> Lattice:
        """Where the settings of a variant are searched; what is not varied is as in its run."""
        config, descends = self.config(variant), self.tune.search == "descent"
        axes: list[Axis | Choices] = []
        for name in ("step_size", "server_step_size"):
            sizes = self._varied(variant, f"{name}s")
            grows = len(sizes) > 1 or (sizes and descends)  # one value alone is meant
            fixed = Choices(sizes or (_number(getattr(config, name)),))
            axes.append(Axis(sizes, self.tune.widen) if grows else fixed)
        work = [self._varied(variant, name) or (getattr(config.work, name),) for name in _WORK]
        both = descends and all(isinstance(axis, Axis) for axis in axes)
        return Lattice((*axes, *map(Choices, work)), trade=both, alone=both)

    def given(self, variant: Variant) -> list[GridPoint]:
        """The points that the file gives; none if it gives only common step sizes."""
        if not (self.step_sizes or variant.grid):
            return []
        return [GridPoint(*point) for point in self.lattice(variant).given]

    def grid(self, variant: Variant) -> list[GridPoint]:
        """The points that tuning tries first: those given, or the one in the middle of them."""
        given = self.given(variant)
        descends = self.tune.search == "descent"
        return [GridPoint(*self.lattice(variant).middle)] if given and descends else given

    def tuned(self, variant: Variant) -> bool:
        """Whether there is more than one point to choose from."""
        axes = self.lattice(variant).axes
        return bool(self.given(variant)) and any(axis.neighbours(axis.middle) for axis in axes)

    def _points(self, variant: Variant) -> list[GridPoint]:
        common = (self.common_point(variant, size) for size in self.common_step_sizes)
        return [*self.given(variant), *common]

    def common_point(self, variant: Variant, step_size: float) -> GridPoint:
        """The variant's other settings, at a step size common to all methods."""
        config = self.config(variant)
        server = _number(config.server_step_size)
        return GridPoint(float(step_size), server, config.work.weight_decay, config.work.clip)

    @functools.cached_property
    def short(self) -> Config:
        """The config of tuning runs; they also evaluate the loss, which shows divergence."""
        tune = self.tune
        assert self.base.evaluation is not None
        rounds = tune.rounds or max(1, self.base.rounds // 5)
        evaluation = EvaluationSpec(
            tune.data,
            tuple(dict.fromkeys([tune.metric, "loss"])),
            every=tune.every or max(1, rounds // 10),
            per_client=False,
            batch_size=self.base.evaluation.batch_size,
            clients=tune.clients or (CLIENTS if tune.data == "training" else None),
        )
        seed = self.seeds[0] if tune.seed is None else tune.seed
        return replace(self.base, rounds=rounds, seed=seed, evaluation=evaluation)

    def trial(self, variant: Variant, point: GridPoint, seed: int | None, repeat: int = 0) -> Trial:
        """The run of a variant at a grid point with a seed; without a seed, a tuning run."""
        own, short = self.config(variant), self.short
        config = replace(
            own,
            step_size=resized(own.step_size, point.step_size),
            server_step_size=resized(own.server_step_size, point.server_step_size),
            work=replace(own.work, weight_decay=point.weight_decay, clip=point.clip),
            rounds=own.rounds if seed is not None else short.rounds,
            seed=seed if seed is not None else short.seed + repeat,
            evaluation=own.evaluation if seed is not None else short.evaluation,
        )
        words = [variant.folder, f"step{float(point.step_size)!r}"]
        usual = self.common_point(variant, point.step_size)
        for name, word in _WORDS.items():
            if (value := getattr(point, name)) != getattr(usual, name):
                words.append(f"{word}{float(value)!r}")
        if repeat:
            words.append(f"repeat{repeat}")
        name = "_".join(words)
        return Trial(SHORT + name if seed is None else f"{name}_seed{seed}", config, point)

    def run(
        self,
        out: Path | str | None = None,
        *,
        jobs: int | None = None,
        progress: bool = False,
        command: str | None = None,
        annotate: "Callable[[Results], None] | None" = None,
    ) -> "Results":
        """Do all runs that are not done yet, several at once.

        Args:
            out: the folder, if not that of the config. Given again after an interruption, finished
                runs are not repeated, and the results are those of a comparison never interrupted.
            jobs: the number of runs at once, each in its own process with one torch thread; by
                default the number of cores.
            progress: whether to show progress on the error stream.
            command: the command that repeats it, for the record.
            annotate: adds to the results before they are written, after every run;
                :func:`fedshuffle.reports.comparison.warnings.annotate` adds warnings.

        Returns:
            The content of ``results.json``.
        """
        from fedshuffle.comparison.runner import run  # these import torch
        from fedshuffle.engines.cpu_tuning import available_cores

        folder = self.base.out if out is None else out
        if folder is None:
            raise FedShuffleError("the comparison needs a folder: give it as out.")
        jobs = available_cores() if jobs is None else count(jobs, "jobs")
        return run(self, results_folder(folder), jobs, progress, command, annotate)


def load(
    path: Path | str, overrides: Mapping[str, Any] | None = None, scale: str | None = None
) -> Comparison:
    """The comparison in a file: the config of a run, with a section ``[compare]``.

    Args:
        path: the file.
        overrides: other values at some dotted keys (``work.batch_size``, ``compare.seeds``).
        scale: the name of a section ``[scale.NAME]`` that overrides the keys of the file.

    >>> from tempfile import TemporaryDirectory
    >>> text = '''
    ... rounds = 3
    ... model = "a:net"
    ... loss = "cross_entropy"
    ... data = "a:clients"
    ... evaluation.data = "a:held_out"
    ... compare.methods = ["fedavg-rr", "fedshuffle"]
    ... '''
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "compare.toml").write_text(text)
    ...     [variant.name for variant in load(Path(folder, "compare.toml")).variants]
    ['fedavg-rr', 'fedshuffle']
    """
    file, changes = Path(path), overrides or {}
    tables = loader.parse(file)
    with at(loader.described(file, changes)):
        changed = loader.override(_scaled(tables, scale), changes)
        text = writer.toml(changed) if changed != tables else file.read_text(encoding="utf-8-sig")
        if "compare" not in changed:
            raise FedShuffleError(
                'the section [compare] is missing: add it with methods = ["fedavg", "fedshuffle"].'
                " To train one method, run: fedshuffle run FILE."
            )
        base = loader.read({k: v for k, v in changed.items() if k != "compare"}, file.parent)
        fields = loader.read_fields(Comparison, changed["compare"], "compare")
        if fields.keys() & {*_WORK, "server_step_sizes"} or "common_step_sizes" not in fields:
            fields = {"step_sizes": (_number(base.step_size),)} | fields
        defaults: dict[str, Any] = {"momentum": (base.momentum,), "seeds": (base.seed,)}
        return Comparison(base, text=text, tables=changed, **defaults | fields)


def _scaled(tables: Mapping[str, Any], scale: str | None) -> dict[str, Any]:
    """The tables without the scales, but with the keys of one."""
    rest = {key: value for key, value in tables.items() if key != "scale"}
    scales = tables.get("scale", {})
    if not isinstance(scales, Mapping) or not all(isinstance(s, Mapping) for s in scales.values()):
        raise FedShuffleError("scale must hold tables: write [scale.NAME] and its keys below.")
    if scale is None:
        return rest
    check_known("scale", scale, scales)
    return _merged(rest, scales[scale])


def _merged(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables with some keys changed."""
    result = {**tables, **changes}
    for key in tables.keys() & changes.keys():
        if isinstance(tables[key], Mapping) and isinstance(changes[key], Mapping):
            result[key] = _merged(tables[key], changes[key])
    return result


_WORK = ("weight_decay", "clip")  # the parts of the local work that a grid may vary
_WORDS = {"server_step_size": "server", "weight_decay": "decay", "clip": "clip"}  # in folders


def _number(size: StepSize) -> float:
    """A step size, or the one that a schedule starts from."""
    return float(size.arguments["step_size"] if isinstance(size, ScheduleSpec) else size)
