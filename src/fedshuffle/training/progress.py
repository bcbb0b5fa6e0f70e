"""What a run shows while it trains: a progress bar, and scalars for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Self

from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from fedshuffle._terminal import Console, progress_bar
from fedshuffle.errors import optional_import
from fedshuffle.training.history import metrics_of


class TrainingProgress:
    """Rounds done, the last known loss, local steps per second, time elapsed and remaining.

    In a notebook it is a bar below the cell. Where the error stream is neither a notebook nor a
    terminal, it is one line at the end.
    """

    def __init__(self, visible: bool, rounds: int, history: Sequence[Mapping[str, Any]]) -> None:
        self._rounds, self._metric = rounds, ""
        self._steps, self._seconds = 0, 0.0
        self._bar: Progress | _NotebookBar
        if visible and Console(stderr=True).is_jupyter:
            self._bar = _NotebookBar()
        else:
            whole = Column(no_wrap=True)
            columns = TimeElapsedColumn(whole), "+", TimeRemainingColumn(table_column=whole)
            self._bar = progress_bar(visible, "{task.fields[note]}", *columns, wide=True)
        done = f"{len(history)}/{rounds} rounds"
        self._task = self._bar.add_task(done, total=rounds, completed=len(history), note="")
        for record in history:
            self._note(record)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, record: Mapping[str, Any]) -> None:
        """Show another round."""
        self._note(record)
        self._steps += record["steps"]
        self._seconds += record["seconds"]
        self._bar.update(
            self._task,
            completed=record["round"],
            description=f"{record['round']}/{self._rounds} rounds",
            note=f"{self._metric}{self._steps / max(self._seconds, 1e-9):,.0f} steps/s",
        )

    def _note(self, record: Mapping[str, Any]) -> None:
        if metrics := metrics_of(record):
            name = "loss" if "loss" in metrics else next(iter(metrics))
            self._metric = f"{name} {metrics[name]:.4g}  "


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


class TensorBoardLogger:
    """Writes records as scalars to a folder for TensorBoard.

    A resumed run writes the folder again from its metrics, so that no round is there twice.
    """

    def __init__(self, folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        # With purge_step a running TensorBoard forgets what it has read.
        self._writer = self.writer_class()(str(folder), purge_step=0)
        for record in history:
            self.add(record)

    @staticmethod
    def writer_class() -> Any:
        """Torch's ``SummaryWriter``, or how to install TensorBoard."""
        module = optional_import("torch.utils.tensorboard", "tensorboard=True", "tensorboard")
        return module.SummaryWriter

    def close(self) -> None:
        """Write the remaining records."""
        self._writer.close()

    def add(self, record: Mapping[str, Any]) -> None:
        """Write another round."""
        for name, value in record.items():
            if name not in ("round", "cohort"):
                self._writer.add_scalar(name, value, record["round"])
