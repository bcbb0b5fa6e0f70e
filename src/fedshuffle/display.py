"""What a run shows while it goes: a bar on the error stream, and scalars for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Self, final

from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from fedshuffle._terminal import Console
from fedshuffle.errors import FedShuffleError
from fedshuffle.runs import FACTS


@final
class Bar:
    """Rounds done of all, the last known loss, local steps per second, time gone and time left.

    In a notebook it is a bar below the cell. Where the error stream is neither a notebook nor a
    terminal, it is one line at the end.
    """

    def __init__(self, visible: bool, rounds: int, history: Sequence[Mapping[str, Any]]) -> None:
        self._rounds, self._done = rounds, len(history)
        self._steps, self._seconds, self._measured, self._note = 0, 0.0, "", ""
        console = Console(stderr=True)
        self._view: _Notebook | _Terminal
        if visible and console.is_jupyter and _Notebook.works():
            self._view = _Notebook()
        else:
            self._view = _Terminal(console, visible)
        for record in history:
            self._measure(record)

    def __enter__(self) -> Self:
        self._view.begin(self._done, self._rounds, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._view.end(self._done, self._rounds, self._note)

    def add(self, record: Mapping[str, Any]) -> None:
        """Another round."""
        self._measure(record)
        self._steps += record["steps"]
        self._seconds += record["seconds"]
        self._note = f"{self._measured}{self._steps / max(self._seconds, 1e-9):,.0f} steps/s"
        self._done = record["round"]
        self._view.update(self._done, self._rounds, self._note)

    def _measure(self, record: Mapping[str, Any]) -> None:
        metrics = {name: value for name, value in record.items() if name not in FACTS}
        if metrics:
            name = "loss" if "loss" in metrics else next(iter(metrics))
            self._measured = f"{name} {metrics[name]:.4g}  "


@final
class _Terminal:
    """A bar on the error stream."""

    def __init__(self, console: Console, visible: bool) -> None:
        whole = Column(no_wrap=True)
        self._bar = Progress(
            TextColumn("{task.completed}/{task.total} rounds"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(whole),
            TextColumn("+"),
            TimeRemainingColumn(table_column=whole),
            console=console,
            disable=not visible,
            expand=True,
        )

    def begin(self, done: int, rounds: int, note: str) -> None:
        self._task = self._bar.add_task("", total=rounds, completed=done, note=note)
        self._bar.start()

    def update(self, done: int, rounds: int, note: str) -> None:
        self._bar.update(self._task, completed=done, note=note)

    def end(self, done: int, rounds: int, note: str) -> None:
        self._bar.stop()


@final
class _Notebook:
    """A bar below the cell of a notebook, which needs nothing that the notebook does not have."""

    def __init__(self) -> None:
        self._begun = self._shown = 0.0
        self._handle: Any = None

    @staticmethod
    def works() -> bool:
        """Whether there is something to show HTML with."""
        try:
            from IPython.display import HTML, display
        except ImportError:
            return False
        return callable(HTML) and callable(display)

    def begin(self, done: int, rounds: int, note: str) -> None:
        from IPython.display import display

        self._begun = time.monotonic()
        self._handle = display(self._page(done, rounds, note), display_id=True)

    def update(self, done: int, rounds: int, note: str) -> None:
        if time.monotonic() - self._shown > 0.2:  # a notebook remembers every message
            self.end(done, rounds, note)

    def end(self, done: int, rounds: int, note: str) -> None:
        self._shown = time.monotonic()
        self._handle.update(self._page(done, rounds, note))

    def _page(self, done: int, rounds: int, note: str) -> Any:
        from IPython.display import HTML

        text = f"{done}/{rounds} rounds  {note}  {time.monotonic() - self._begun:.0f} s"
        return HTML(f'<progress value="{done}" max="{rounds}"></progress> {escape(text)}')


@final
class Board:
    """The records as scalars in a folder for TensorBoard.

    A run that goes on writes the folder anew from its metrics, so that no round is there twice.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._writer: Any = None
        if wanted:
            _summary_writer()  # what is missing is better missed now than after the first round

    def open(self, folder: Path, history: Sequence[Mapping[str, Any]]) -> Self:
        """Begin with these records."""
        if self._wanted:
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
            # To a TensorBoard that is watching, purge_step says to forget what it has read.
            self._writer = _summary_writer()(str(folder), purge_step=0)
            for record in history:
                self.add(record)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, record: Mapping[str, Any]) -> None:
        """Another round."""
        if self._writer is not None:
            for name, value in record.items():
                if name not in ("round", "cohort"):
                    self._writer.add_scalar(name, value, record["round"])


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise FedShuffleError(
            f"writing for TensorBoard needs it installed ({error}). Install it with"
            " pip install 'fedshuffle[tensorboard]'."
        ) from error
    return SummaryWriter
