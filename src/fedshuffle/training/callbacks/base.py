"""What a callback is, and how the loop calls many of them."""

import abc
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fedshuffle.errors import FedShuffleError, error_context, user_error
from fedshuffle.state import State
from fedshuffle.training.monitoring import Record
from fedshuffle.training.simulation import Simulation

if TYPE_CHECKING:
    from fedshuffle.training.result import Result


@dataclass(frozen=True)
class TrainingContext:
    """What a callback knows of the training that starts."""

    simulation: Simulation
    rounds: int
    """The number of rounds that the training shall have in all."""
    history: Sequence[Record]
    """The records of the rounds that are done, if a run is resumed; grows with every round."""
    evaluated: Collection[str] | None = ()
    """The metrics that will be evaluated; None if a function evaluates, whose names are not known
    before it is called."""
    folder: Path | None = None
    """The folder of the run, if it has one."""
    run_id: str | None = None
    """The id of the run in the folder, the same when it is resumed."""


class Callback(abc.ABC):
    """Something that happens around the rounds of a training.

    A hook that returns True stops the training, after all callbacks have seen the round. A resumed
    run has to do what an uninterrupted one does: a callback whose decisions depend on the past
    reads it from ``context.history`` when it starts, as nothing else of it is saved.

    >>> class Norms(Callback):
    ...     def on_start(self, context):
    ...         self.norms = []
    ...
    ...     def on_round(self, record, state):
    ...         self.norms.append(float(state.x.norm()))
    ...         return self.norms[-1] > 100
    """

    changes_step_size: ClassVar[bool] = False
    """Whether the callback sets ``step_factor``. Then a run is resumed only with a callback of the
    same ``repr``."""
    step_factor: float = 1.0
    """The factor of the step size in the next round; must follow from the records so far."""

    def on_start(self, context: TrainingContext) -> bool | None:
        """Before the first round, and when a run is resumed."""
        return None

    @abc.abstractmethod
    def on_round(self, record: Record, state: State) -> bool | None:
        """After a round, with its record and the state it led to."""

    def on_end(self, result: "Result | None") -> None:
        """After the last round, with the result, or None if an error ended the training."""
        return


class Callbacks:
    """Calls the hooks of all callbacks in turn. An error names the callback and the round."""

    def __init__(self, callbacks: Sequence[Callback], context: TrainingContext) -> None:
        self._callbacks = callbacks
        self._context = context
        self._open: list[Callback] = []
        """Those that have started and not ended."""
        self.stopped: str | None = None
        """Which callback stopped the training, and when."""

    @property
    def step_factor(self) -> float:
        """The factor of the step size in the next round."""
        for callback in self._callbacks:
            if callback.step_factor != 1.0 and not callback.changes_step_size:
                raise FedShuffleError(
                    f"callback {type(callback).__name__} sets step_factor, so a resumed run needs"
                    " it too: give its class the attribute changes_step_size = True."
                )
        return math.prod(callback.step_factor for callback in self._callbacks)

    def start(self) -> None:
        """Before the first round."""
        for callback in self._callbacks:
            self._call(callback, callback.on_start, self._context)
            self._open.append(callback)

    def round(self, record: Record, state: State) -> None:
        """After a round."""
        for callback in self._callbacks:
            self._call(callback, callback.on_round, record, state)

    def end(self, result: "Result") -> None:
        """After the last round."""
        while self._open:
            callback = self._open.pop(0)
            with self._named(callback):
                callback.on_end(result)

    def _call(self, callback: Callback, hook: Callable[..., bool | None], *given: Any) -> None:
        with self._named(callback):
            stop = hook(*given)
        if stop and self.stopped is None:
            name, done = type(callback).__name__, len(self._context.history)
            self.stopped = f"{name} stopped training after round {done}"

    def _named(self, callback: Callback) -> AbstractContextManager[None]:
        name, done = type(callback).__name__, len(self._context.history)
        return error_context(f"callback {name} {f'after round {done}' if done else 'at the start'}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for callback in self._open:  # after an error, which another must not hide
            try:
                callback.on_end(None)
            except Exception as second:
                if error is not None:
                    name = type(callback).__name__
                    error.add_note(f"callback {name} failed at the end: {user_error(second)}.")


def check_callbacks(callbacks: Any) -> list[Callback]:
    """The callbacks as a list, or an error that names what is none."""
    found = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
    for one in found:
        if not isinstance(one, Callback):
            hint = f" Give {one.__name__}(...)." if isinstance(one, type) else ""
            raise FedShuffleError(
                f"callbacks must be a list of Callback objects, and {one!r:.60} is none.{hint}"
            )
    return found
