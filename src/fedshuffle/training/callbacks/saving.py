"""Callbacks that write a run to its folder: checkpoints, and scalars for TensorBoard."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshuffle._arrays import count
from fedshuffle.errors import FedShuffleError, optional_import
from fedshuffle.state import State
from fedshuffle.training.callbacks.base import Callback, TrainingContext
from fedshuffle.training.monitoring import Record, scalars
from fedshuffle.training.run_folder import RunFolder

if TYPE_CHECKING:
    from fedshuffle.training.result import Result


class Checkpointing(Callback):
    """Write every record to the folder of the run, and checkpoints to resume from.

    ``train(..., out="runs/a")`` is short for ``callbacks=[Checkpointing("runs/a")]``.

    Args:
        folder: the folder of the run, or a ``RunFolder``.
        every: save after every this many rounds, and after the last.
        keep: the number of checkpoints to keep; a ``RunFolder`` has its own.

    >>> Checkpointing("runs/a", every=5).folder.path.name
    'a'
    """

    def __init__(
        self, folder: str | os.PathLike[str] | RunFolder, every: int = 10, keep: int = 3
    ) -> None:
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(folder, keep)
        self._every = count(every, "checkpoint_every")
        self._unsaved: State | None = None

    def on_round(self, record: Record, state: State) -> None:
        save = state.round % self._every == 0
        self.folder.add(record, state, save)
        self._unsaved = None if save else state

    def on_end(self, result: "Result | None") -> None:
        if result is None:  # the loop saves the last complete round, whatever happened
            return
        if self._unsaved is not None:
            self.folder.save(self._unsaved)
            self._unsaved = None
        if result.clients is not None:
            result.clients.to_csv(self.folder.path / "clients.csv")


class TensorBoard(Callback):
    """Write every number of every record for TensorBoard, with the round as its step.

    A resumed run writes the files again from its records, so that no round is there twice.

    Args:
        path: the folder to write to; by default ``tensorboard`` in the folder of the run.

    >>> from fedshuffle import callbacks
    >>> board = callbacks.TensorBoard("logs/first")  # train(..., callbacks=[board])
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._writer: Any = None
        # Fail before training if it is missing.
        self._board = optional_import("torch.utils.tensorboard", "TensorBoard", "tensorboard")

    def on_start(self, context: TrainingContext) -> None:
        if self._path is None and context.folder is None:
            raise FedShuffleError("TensorBoard needs a folder: give it, or give train one as out.")
        path = Path(self._path or f"{context.folder}/tensorboard")
        for old in path.glob("events.out.tfevents.*"):
            old.unlink()
        # With purge_step a running TensorBoard forgets what it has read.
        self._writer = self._board.SummaryWriter(str(path), purge_step=0)
        for record in context.history:
            self._add(record)

    def on_round(self, record: Record, state: State) -> None:
        self._add(record)

    def on_end(self, result: "Result | None") -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["round"])
