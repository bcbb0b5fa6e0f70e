"""What a run shows while it trains: a progress bar, scalars for TensorBoard, and divergence."""

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from html import escape
from pathlib import Path
from typing import Any

from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from fedshuffle._terminal import Console, progress_bar

Record = Mapping[str, Any]
Show = Callable[[Record], None]

_COSTS = ("clients", "steps", "bytes_down", "bytes_up")
RECORD_KEYS = ("round", *_COSTS, "cohort", "seconds", "evaluation_seconds")
"""Keys of a record that are not metrics."""


def metrics_of(record: Record) -> dict[str, Any]:
    """The metrics in a record."""
    return {name: value for name, value in record.items() if name not in RECORD_KEYS}


@contextmanager
def training_progress(visible: bool, rounds: int, history: Sequence[Record]) -> Iterator[Show]:
    """A bar with rounds done, the last known loss, local steps per second, and times.

    Gives a function that shows another round. In a notebook it is a bar below the cell. Where the
    error stream is neither a notebook nor a terminal, it is one line at the end.
    """
    bar: Progress | _NotebookBar
    if visible and Console(stderr=True).is_jupyter:
        bar = _NotebookBar()
    else:
        whole = Column(no_wrap=True)
        columns = TimeElapsedColumn(whole), "+", TimeRemainingColumn(table_column=whole)
        bar = progress_bar(visible, "{task.fields[note]}", *columns, wide=True)
    done = len(history)
    task = bar.add_task(f"{done}/{rounds} rounds", total=rounds, completed=done, note="")
    known = next(filter(None, map(metrics_of, reversed(history))), {})
    steps, seconds = 0, 0.0

    def show(record: Record) -> None:
        nonlocal known, steps, seconds
        known = metrics_of(record) or known
        steps += record["steps"]
        seconds += record["seconds"]
        name = "loss" if "loss" in known else next(iter(known), None)
        metric = "" if name is None else f"{name} {known[name]:.4g}  "
        note = f"{metric}{steps / max(seconds, 1e-9):,.0f} steps/s"
        done = record["round"]
        bar.update(task, completed=done, description=f"{done}/{rounds} rounds", note=note)

    bar.start()
    try:
        yield show
    finally:
        bar.stop()


class _NotebookBar:
    """The part of rich's ``Progress`` used here, as HTML: rich itself would need ipywidgets."""

    def add_task(self, description: str, **shown: Any) -> Any:
        self._shown = {"description": description, **shown}
        self._begun = self._updated = time.monotonic()

    def start(self) -> None:
        from IPython.display import display

        self._handle: Any = display(self._html(), display_id=True)

    def update(self, task: Any, **shown: Any) -> None:
        self._shown |= shown
        if time.monotonic() - self._updated > 0.2:  # a notebook stores every message
            self.stop()

    def stop(self) -> None:
        self._updated = time.monotonic()
        self._handle.update(self._html())

    def _html(self) -> Any:
        from IPython.display import HTML

        shown, seconds = self._shown, time.monotonic() - self._begun
        text = escape(f"{shown['description']}  {shown['note']}  {seconds:.0f} s")
        bar = '<progress value="{completed}" max="{total}"></progress>'.format(**shown)
        return HTML(f"{bar} {text}")


@contextmanager
def tensorboard_log(writer_type: Any, folder: Path, history: Sequence[Record]) -> Iterator[Show]:
    """A function that writes a record as scalars to a folder, with torch's ``SummaryWriter``.

    A resumed run writes the folder again from its metrics, so that no round is there twice.
    """
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    # With purge_step a running TensorBoard forgets what it has read.
    writer = writer_type(str(folder), purge_step=0)

    def add(record: Record) -> None:
        for name, value in record.items():
            if name not in ("round", "cohort"):
                writer.add_scalar(name, value, record["round"])

    with closing(writer):
        for record in history:
            add(record)
        yield add


def has_diverged(loss: float, start: float) -> bool:
    """Whether a loss is not finite, or more than ten times that of the start.

    A loss that is zero or negative at the start sets no limit.
    """
    return not math.isfinite(loss) or loss > 10 * start > 0


def monitored_loss(names: Collection[str]) -> str | None:
    """The metric that shows divergence: the loss on training data, or else the loss."""
    return next((name for name in ("train_loss", "loss") if name in names), None)


class DivergenceMonitor:
    """Compares the loss of each record with that of the start, and warns once.

    The start is the name and value of the loss before training, or else the first loss recorded.
    """

    def __init__(self, start: tuple[str, float] | None, history: Sequence[Record] = ()) -> None:
        self.name: str | None
        self.name, self._first = start or (None, math.nan)
        self._when = "at the start"
        self._warned = True  # of the rounds before a run was resumed
        self.diverged: str | None = None
        """Why the run counts as diverged; None otherwise."""
        for record in history:
            self.add(record)
        self._warned = False

    def add(self, record: Record) -> None:
        """Check the record of one round."""
        name = self.name or monitored_loss(record)
        if name is None or name not in record:
            return
        loss, when = record[name], f"after round {record['round']}"
        if self.name is None:
            self.name, self._first, self._when = name, loss, when
        self.diverged = None
        if has_diverged(loss, self._first):
            was = f"was {self._first:.4g} {self._when}"
            self.diverged = f"the {name} is {loss:.4g} {when}, and {was}"
        if self.diverged and not self._warned:
            warnings.warn(f"training diverges: {self.diverged}. Lower the step size.", stacklevel=3)
            self._warned = True
