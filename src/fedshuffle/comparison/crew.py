"""The processes that do the runs, and a claim on the folder so that no other crew works there."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

from fedshuffle.errors import FedShuffleError

if sys.platform != "win32":
    import fcntl

PATIENCE = 30.0
"""Seconds that a worker has to save its run when it is told to stop."""

Answer = dict[str, Any] | None
"""What a worker says of a run; None if it died instead."""


@contextmanager
def claimed(folder: Path, seconds: float = 10.0) -> Iterator[tuple[int, ...]]:
    """Let only one comparison work in a folder; gives what workers must keep open.

    They hold the claim as well: those of a comparison that was killed may need a moment to notice.
    """
    if sys.platform == "win32":
        yield ()
        return
    with (folder / "lock").open("w") as file:
        last = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > last:
                    raise FedShuffleError(
                        f"another comparison is at work in {str(folder)!r}. Wait for it, or choose"
                        " another folder."
                    ) from None
                time.sleep(0.1)
        yield (file.fileno(),)


class _Worker:
    """One process, and a thread that waits for its answers."""

    def __init__(self, events: queue.SimpleQueue[Any], log: Path, keep: tuple[int, ...]) -> None:
        self.folder: Path | None = None
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fedshuffle.comparison.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **one},
                text=True,
                pass_fds=keep,
            )
        self._listener = threading.Thread(target=self._listen, args=(events,), daemon=True)
        self._listener.start()

    def _listen(self, events: queue.SimpleQueue[Any]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            events.put((self, json.loads(line)))
        events.put((self, None))

    def send(self, folder: Path) -> None:
        assert self.process.stdin is not None
        self.folder = folder
        with contextlib.suppress(OSError):  # if it is dead, its listener will tell
            self.process.stdin.write(json.dumps(str(folder.resolve())) + "\n")
            self.process.stdin.flush()

    def close(self) -> int:
        """Wait for the end, and leave nothing open."""
        code = self.process.wait()
        self._listener.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        return code


@final
class Crew:
    """So many workers, each with one torch thread; one that dies is replaced when needed."""

    def __init__(self, jobs: int, log: Path, keep: tuple[int, ...] = ()) -> None:
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs, self._log, self._keep = jobs, log, keep
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        for _ in range(self._jobs):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.terminate()  # a run is then saved, as by Ctrl-C
        last = time.monotonic() + PATIENCE
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, last - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
            worker.close()

    @property
    def running(self) -> list[Path]:
        """The folders of the runs that are being done."""
        return [worker.folder for worker in self._workers if worker.folder is not None]

    @property
    def free(self) -> bool:
        """Whether somebody could do another run."""
        return len(self.running) < self._jobs

    def give(self, folder: Path) -> None:
        """Have somebody do the run in a folder."""
        idle = [worker for worker in self._workers if worker.folder is None]
        (idle[0] if idle else self._start()).send(folder)

    def wait(self, seconds: float) -> tuple[Path, Answer] | None:
        """The folder of a run that is over, and what was said of it; None if there is none yet."""
        try:
            worker, answer = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        folder, worker.folder = worker.folder, None
        if answer is None:
            self._workers.remove(worker)
            worker.close()
        return None if folder is None else (folder, answer)

    def _start(self) -> _Worker:
        worker = _Worker(self._events, self._log, self._keep)
        self._workers.append(worker)
        return worker
