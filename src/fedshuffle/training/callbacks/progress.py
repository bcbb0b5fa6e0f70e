"""A progress bar, in a terminal or a notebook."""

import sys
import time
from html import escape
from typing import TYPE_CHECKING, Any

from rich.progress import Progress as RichProgress
from rich.progress import TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from fedshuffle._terminal import Console, progress_bar
from fedshuffle.state import State
from fedshuffle.training.callbacks.base import Callback, TrainingContext
from fedshuffle.training.monitoring import Record, evaluated, is_evaluated

if TYPE_CHECKING:
    from fedshuffle.training.result import Result


class Progress(Callback):
    """A bar with rounds done, the last known loss, the simulated time if there is a clock, local
    steps per second, and times.

    The loss is the evaluated one, or else another metric that was evaluated, or else the training
    loss. In a notebook the bar is below the cell. Where the error stream is neither a notebook nor
    a terminal, it is one line at the end.

    >>> from fedshuffle import callbacks
    >>> bar = callbacks.Progress()  # train(..., callbacks=[bar]), or progress=True
    """

    def on_start(self, context: TrainingContext) -> None:
        simulation = context.simulation
        name = simulation.engine.name
        if simulation.engine_reason:
            print(f"engine {name} ({simulation.engine_reason})", file=sys.stderr)
        self._bar: RichProgress | _NotebookBar
        if Console(stderr=True).is_jupyter:
            self._bar = _NotebookBar()
        else:
            whole = Column(no_wrap=True)
            columns = TimeElapsedColumn(whole), "+", TimeRemainingColumn(table_column=whole)
            self._bar = progress_bar(True, "{task.fields[note]}", *columns, wide=True)
        self._rounds, done = context.rounds, len(context.history)
        text = f"{done}/{self._rounds} rounds"
        self._task = self._bar.add_task(text, total=self._rounds, completed=done, note="")
        last = next(filter(is_evaluated, reversed(context.history)), {})
        self._known = evaluated(last)
        self._steps, self._seconds = 0, 0.0
        self._bar.start()

    def on_round(self, record: Record, state: State) -> None:
        if is_evaluated(record):
            found = evaluated(record)  # with what transforms report
            self._known = {name: found[name] for name in found if name not in state.metrics}
        self._steps += record["steps"]
        self._seconds += record["seconds"]
        known = self._known or {k: v for k, v in record.items() if k == "train_loss"}
        name = "loss" if "loss" in known else next(iter(known), None)
        metric = "" if name is None else f"{name} {known[name]:.4g}  "
        clock = f"time {record['time']:,.4g} s  " if "time" in record else ""
        note = f"{metric}{clock}{self._steps / max(self._seconds, 1e-9):,.0f} steps/s"
        done = record["round"]
        text = f"{done}/{self._rounds} rounds"
        self._bar.update(self._task, completed=done, description=text, note=note)

    def on_end(self, result: "Result | None") -> None:
        self._bar.stop()


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
