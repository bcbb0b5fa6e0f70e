"""What a run shows while it trains: a progress bar, and scalars for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from html import escape
from pathlib import Path
from typing import Any

from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from fedshuffle._terminal import Console, progress_bar
from fedshuffle.errors import optional_import
from fedshuffle.training.result import metrics_of

Record = Mapping[str, Any]


@contextmanager
def training_progress(
    visible: bool, rounds: int, history: Sequence[Record]
) -> Iterator[Callable[[Record], None]]:
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
    known: dict[str, float] = {}
    for record in history:
        known = metrics_of(record) or known
    steps, seconds = 0, 0.0

    def show(record: Record) -> None:
        nonlocal known, steps, seconds
        known = metrics_of(record) or known
        steps += record["steps"]
        seconds += record["seconds"]
        name = "loss" if "loss" in known else next(iter(known), None)
        metric = "" if name is None else f"{name} {known[name]:.4g}  "
        bar.update(
            task,
            completed=record["round"],
            description=f"{record['round']}/{rounds} rounds",
            note=f"{metric}{steps / max(seconds, 1e-9):,.0f} steps/s",
        )

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
        return HTML(
            f'<progress value="{shown["completed"]}" max="{shown["total"]}"></progress> {text}'
        )


def summary_writer() -> Any:
    """Torch's ``SummaryWriter``, or how to install TensorBoard."""
    module = optional_import("torch.utils.tensorboard", "tensorboard=True", "tensorboard")
    return module.SummaryWriter


@contextmanager
def tensorboard_log(folder: Path, history: Sequence[Record]) -> Iterator[Callable[[Record], None]]:
    """A function that writes a record as scalars to a folder for TensorBoard.

    A resumed run writes the folder again from its metrics, so that no round is there twice.
    """
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    # With purge_step a running TensorBoard forgets what it has read.
    writer = summary_writer()(str(folder), purge_step=0)

    def add(record: Record) -> None:
        for name, value in record.items():
            if name not in ("round", "cohort"):
                writer.add_scalar(name, value, record["round"])

    with closing(writer):
        for record in history:
            add(record)
        yield add
