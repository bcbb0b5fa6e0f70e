"""What one file says about a run, as plain data that is checked however it was made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from fedshuffle import methods, schedules
from fedshuffle._arrays import count, expect
from fedshuffle.config import imports
from fedshuffle.errors import FedShuffleError
from fedshuffle.local_work import LocalWork
from fedshuffle.randomness import check_seed

if TYPE_CHECKING:
    from fedshuffle.config.running import Task
    from fedshuffle.training import Result


@contextmanager
def at(key: str) -> Iterator[None]:
    """Give an error the key that it is about."""
    try:
        yield
    except FedShuffleError as error:
        raise FedShuffleError(f"{key}: {error}") from error


@final
@dataclass(frozen=True)
class Use:
    """Something of the user's: an import path ``package.module:attribute``, and arguments."""

    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Store:
    """A federation that lies in a folder."""

    path: str


@final
@dataclass(frozen=True)
class Scheduled:
    """A step size that changes with the rounds: a function of :mod:`fedshuffle.schedules`.

    >>> Scheduled("inverse_time", {"step_size": 1.0, "halved_after": 10}).over(100)(10)
    0.5
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def pinned(self, rounds: int) -> Scheduled:
        """The same, with the number of rounds written out where it depends on them."""
        if "rounds" not in schedules.parameters(self.name):
            return self
        return Scheduled(self.name, {"rounds": rounds} | dict(self.arguments))

    def over(self, rounds: int) -> Callable[[int], float]:
        """The step size by round, in a run of so many rounds."""
        return schedules.made(self.name, self.arguments, rounds)


@final
@dataclass(frozen=True)
class Evaluating:
    """On what, by what and how often the model is evaluated."""

    data: Use | Store | Literal["training"]
    metrics: tuple[str, ...] = ("loss", "accuracy")
    every: int = 1
    per_client: bool = True
    batch_size: int = 1024
    clients: int | None = None
    """Only so many of the clients, drawn once."""
    training: int | None = None
    """Also give ``train_loss``, on the training data of so many clients, drawn once."""

    def __post_init__(self) -> None:
        for name in ("every", "batch_size", "clients", "training"):
            if (value := getattr(self, name)) is not None:
                count(value, f"evaluation.{name}")


@final
@dataclass(frozen=True)
class Checkpoints:
    """How often the state is saved, and how many are kept."""

    every: int = 10
    keep: int = 3

    def __post_init__(self) -> None:
        count(self.every, "checkpoints.every")
        count(self.keep, "checkpoints.keep")


@final
@dataclass(frozen=True)
class Config:
    """One run. Vary it with :func:`dataclasses.replace` or :meth:`override`.

    >>> config = Config(rounds=3, model=Use("a:model"), loss=Use("a:loss"), data=Store("a"))
    >>> config.override({"work.batch_size": 16}).work.batch_size
    16
    """

    rounds: int
    model: Use
    loss: Use
    data: Use | Store
    seed: int = 0
    method: str = "fedshuffle"
    momentum: str | None = None
    sampling: str = "full"
    step_size: float | Scheduled = 0.1
    server_step_size: float | Scheduled = 1.0
    work: LocalWork = field(default_factory=LocalWork)
    engine: str = "lean"
    device: str | None = None
    """Where to train: ``"cpu"``, ``"cuda"``, ``"mps"``; where the model is if none."""
    evaluation: Evaluating | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    tensorboard: bool = False
    out: Path | None = None
    folder: Path = field(default_factory=Path.cwd)
    """Where import paths and relative paths start from."""
    origin: tuple[str, ...] = field(default=(), compare=False)
    """From which file and overrides it was made; only for the record."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).resolve())
        count(self.rounds, "rounds")
        check_seed(self.seed)
        expect(self.work, LocalWork, "work")
        for name in ("method", "sampling", "engine"):
            expect(getattr(self, name), str, name)
        if not methods.is_import_path(self.method):
            methods.get(self.method)
        if self.momentum is not None:
            expect(self.momentum, str, "momentum")
            methods.parse_momentum(self.momentum)
        _check_sizes(self.step_size, self.rounds, "step_size")
        _check_sizes(self.server_step_size, self.rounds, "server_step_size")

    def override(self, changes: Mapping[str, Any]) -> Config:
        """This config with other values at dotted keys, as a file would give them."""
        from fedshuffle.config.reading import override, read
        from fedshuffle.config.writing import plain

        said = tuple(f"With {key} = {value}." for key, value in changes.items())
        changed = read(override(plain(self), changes), self.folder)
        return replace(changed, origin=self.origin + said)

    def pinned(self) -> Config:
        """This config with schedules that stay as they are when more rounds are asked for."""
        sizes = {"step_size": self.step_size, "server_step_size": self.server_step_size}
        pinned = {
            key: size.pinned(self.rounds)
            for key, size in sizes.items()
            if isinstance(size, Scheduled)
        }
        return replace(self, **pinned)  # type: ignore[arg-type]

    def importable(self) -> AbstractContextManager[None]:
        """Within this context, what the config imports is loaded once, also for several runs."""
        return imports.importable(self.folder)

    def task(self) -> Task:
        """The data, the loss and the evaluation, ready to be shared by runs that vary the rest."""
        from fedshuffle.config import running

        return running.task(self)

    def run(
        self,
        out: Path | str | None = None,
        *,
        progress: bool = False,
        task: Task | None = None,
        address: str | None = None,
    ) -> Result:
        """Train as the config says; see :func:`fedshuffle.config.running.run`."""
        from fedshuffle.config import running

        return running.run(self, out, progress=progress, task=task, address=address)


def _check_sizes(size: float | Scheduled, rounds: int, key: str) -> None:
    """Refuse a step size that cannot be, in whichever round."""
    with at(key):
        schedule = size.over(rounds) if isinstance(size, Scheduled) else size
        for round in {0, rounds - 1, *range(0, rounds, -(-rounds // 1000))}:
            try:
                schedules.value(schedule, round, key.replace("_", " "))
            except (ArithmeticError, TypeError) as error:
                raise FedShuffleError(f"the schedule cannot be computed: {error}.") from error
