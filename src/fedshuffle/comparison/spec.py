"""The comparison that a file describes, and the runs that follow from it."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from fedshuffle._arrays import count, number
from fedshuffle._files import results_folder
from fedshuffle.config import Config, EvaluationSpec, ScheduleSpec, loader
from fedshuffle.config.schema import Count, DataSpec, StepSize, at
from fedshuffle.errors import FedShuffleError, check_known
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.randomness import check_seed

if TYPE_CHECKING:
    from fedshuffle.comparison.results import Results

SHORT = "tune_"  # the prefix of the names of tuning runs
CLIENTS = 100  # on which tuning evaluates the training loss

Clip = Annotated[float, lambda x, key: math.inf if x == "none" else loader.read_number(x, key)]

Pair = tuple[str, str | None]
"""A method and a momentum; None is the method's own."""


class Criterion(NamedTuple):
    """A metric to rank by, and whether a higher value is better."""

    metric: str
    higher_is_better: bool


@dataclass(frozen=True)
class GridPoint:
    """One point of the grid that tuning searches.

    >>> GridPoint(step_size=0.1, weight_decay=0.0, clip=5.0).step_size
    0.1
    """

    step_size: float
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

    def __post_init__(self) -> None:
        number(self.widen, "widen", within="[1, inf]")
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


@dataclass(frozen=True)
class Comparison:
    """Methods with and without momentum, over seeds, each at the grid point that suits it best.

    The fields from ``methods`` to ``tune`` are the keys of the section ``[compare]``.

        >>> from fedshuffle.config import ImportSpec, StorePath
        >>> model, loss, data = ImportSpec("mine:net"), ImportSpec("cross_entropy"), StorePath("a")
        >>> base = Config(100, model, loss, data, evaluation=EvaluationSpec(StorePath("b")))
        >>> Comparison(base, methods=("fedavg-rr", "fedshuffle"), step_sizes=(0.1, 1.0)).pairs
        [('fedavg-rr', None), ('fedshuffle', None)]
    """

    base: Config = field(metadata={"key": False})
    """The run that all others are variations of."""
    methods: tuple[str, ...] = field(
        metadata={"add": 'the methods to compare, such as ["fedavg-rr", "fedshuffle"]'}
    )
    """The methods to compare, by name or import path."""
    momentum: tuple[str | None, ...] = (None,)
    """Each method is run with each of them; by default that of the run."""
    seeds: tuple[int, ...] = (0,)
    """The seeds of the full runs; by default that of the run."""
    step_sizes: tuple[float, ...] = ()
    """Each method gets the best of them; by default that of the run."""
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
        for name, values in vars(self).items():
            if isinstance(values, tuple) and len(set(values)) < len(values):
                twice = next(value for value in values if values.count(value) > 1)
                raise FedShuffleError(f"compare.{name} has {twice!r} twice: drop one of them.")
        for key, name in {"methods": "method", "momentum": "momentum", "seeds": "seed"}.items():
            for value in getattr(self, key):
                with at(f"compare.{key}"):
                    replace(self.base, **{name: value})
        if not self.step_sizes and not self.common_step_sizes:
            raise FedShuffleError("there is no step size to run: give compare.step_sizes.")
        for point in self._points:
            with at("compare"):
                self.trial((self.methods[0], None), point, None)

    def check_work(self, method: Method) -> None:
        """Refuse a method that fixes a part of the local work which this comparison sets otherwise.

        A part that is not set is left to each method.
        """
        with at("compare.methods"):
            for point in self._points:
                method.local_work(self._work(point))
            for name in method.work.keys() & {"weight_decay", "clip"}:
                if set(getattr(self, name)) - {method.work[name]}:  # the default too, if listed
                    raise FedShuffleError(
                        f"{method.name} needs {name} = {method.work[name]!r}, so it cannot vary."
                        f" Leave compare.{name} out, or choose another method."
                    )

    @property
    def pairs(self) -> list[Pair]:
        """Every method with every momentum."""
        return list(itertools.product(self.methods, self.momentum))

    @functools.cached_property
    def grid(self) -> tuple[GridPoint, ...]:
        """The points that tuning tries first; what is not varied is as in the base."""
        work = self.base.work
        axes = self.step_sizes, self.weight_decay or [work.weight_decay], self.clip or [work.clip]
        return tuple(GridPoint(*map(float, point)) for point in itertools.product(*axes))

    @property
    def tuned(self) -> bool:
        """Whether there is more than one point to choose from."""
        return len(self.grid) > 1

    @property
    def _points(self) -> list[GridPoint]:
        return [*self.grid, *map(self.common_point, self.common_step_sizes)]

    def _work(self, point: GridPoint) -> LocalWork:
        return replace(self.base.work, weight_decay=point.weight_decay, clip=point.clip)

    def common_point(self, step_size: float) -> GridPoint:
        """The base's weight decay and clipping, at a step size common to all methods."""
        return GridPoint(step_size, self.base.work.weight_decay, self.base.work.clip)

    def wider(self, tried: Mapping[GridPoint, bool], best: GridPoint) -> list[GridPoint]:
        """The points to try next if the best step size is at an end of those tried, else none.

        If the smallest step size diverged, no best above it is trusted: smaller ones come next.

        Args:
            tried: whether the run at each point diverged.
            best: the best of them.
        """
        sizes = {point.step_size for point in tried}
        smallest = min(sizes)
        lost = all(diverged for point, diverged in tried.items() if point.step_size == smallest)
        size = smallest if lost else best.step_size
        beyond = next_step_size(set(map(float, self.step_sizes)), sizes, size, self.tune.widen)
        rest = dict.fromkeys((point.weight_decay, point.clip) for point in self.grid)
        return [] if beyond is None else [GridPoint(beyond, *point) for point in rest]

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

    def trial(self, pair: Pair, point: GridPoint, seed: int | None) -> Trial:
        """The run of a method at a grid point with a seed; without a seed, the tuning run."""
        method, momentum = pair
        base = self.short if seed is None else replace(self.base, seed=seed)
        size: StepSize = point.step_size
        if isinstance(base.step_size, ScheduleSpec):
            arguments = {**base.step_size.arguments, "step_size": point.step_size}
            size = ScheduleSpec(base.step_size.name, arguments)
        config = replace(
            base, method=method, momentum=momentum, step_size=size, work=self._work(point), out=None
        )
        words = [method, momentum or "", f"step{float(point.step_size)!r}"]
        if point.weight_decay != base.work.weight_decay:
            words.append(f"decay{float(point.weight_decay)!r}")
        if point.clip != base.work.clip:
            words.append(f"clip{float(point.clip)!r}")
        words.append("" if seed is None else f"seed{seed}")
        name = "_".join(re.sub(r"[^\w.+-]+", "-", word) for word in words if word)
        return Trial((SHORT if seed is None else "") + name, config, point)

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
    ...     load(Path(folder, "compare.toml")).pairs
    [('fedavg-rr', None), ('fedshuffle', None)]
    """
    file, changes = Path(path), overrides or {}
    tables = loader.parse(file)
    with at(loader.described(file, changes)):
        changed = loader.override(_scaled(tables, scale), changes)
        text = loader.toml(changed) if changed != tables else file.read_text(encoding="utf-8-sig")
        if "compare" not in changed:
            raise FedShuffleError(
                'the section [compare] is missing: add it with methods = ["fedavg", "fedshuffle"].'
                " To train one method, run: fedshuffle run FILE."
            )
        base = loader.read({k: v for k, v in changed.items() if k != "compare"}, file.parent)
        fields = loader.read_fields(Comparison, changed["compare"], "compare")
        if fields.keys() & {"weight_decay", "clip"} or "common_step_sizes" not in fields:
            size = base.step_size
            own = size.arguments["step_size"] if isinstance(size, ScheduleSpec) else size
            fields = {"step_sizes": (own,)} | fields
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
    result = dict(tables)
    for key, value in changes.items():
        if isinstance(old := result.get(key), Mapping) and isinstance(value, Mapping):
            value = _merged(old, value)
        result[key] = value
    return result


def next_step_size(grid: Set[float], tried: Set[float], best: float, widen: float) -> float | None:
    """The step size beyond the end of those tried, if the best one is at that end; else None.

    The grid grows with its own mean spacing, but at least by a factor of 2 and at most of 10, in
    two significant digits, up to ``widen`` times beyond its end. A single step size never grows.

    >>> grid = {0.01, 0.03, 0.1}
    >>> next_step_size(grid, grid, 0.01, 1000), next_step_size(grid, grid | {0.0032}, 0.1, 1000)
    (0.0032, 0.32)
    >>> next_step_size(grid, grid, 0.03, 1000), next_step_size(grid, grid, 0.1, 1)
    (None, None)
    """
    low, high = min(grid), max(grid)
    if len(grid) < 2 or min(tried) < best < max(tried):
        return None
    spacing = min(max((high / low) ** (1 / (len(grid) - 1)), 2.0), 10.0)
    down = best == min(tried)
    factor = spacing ** (1 + sum(size < low if down else size > high for size in tried))
    if factor > widen * (1 + 1e-9):
        return None
    return float(f"{low / factor if down else high * factor:.2g}")
