"""Worker processes: forks of a clean process, never of the program itself.

A fork of a program whose threads have computed inherits the locks of its libraries (MKL, OpenMP)
but not the threads that would release them, and may wait for ever. So workers are forks of
:mod:`multiprocessing`'s fork server: a new Python that imports torch once, computes nothing and has
a single thread.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from fedshuffle.errors import FedShuffleError

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_SERVER = {**_ONE_THREAD, "PYTHONSAFEPATH": "1"}  # and no modules from the current folder
_lock = threading.Lock()


class WorkerProcess:
    """A process that runs ``work(connection, *args)``, and dies with this program."""

    def __init__(self, work: Callable[..., None], *args: Any, daemon: bool = True) -> None:
        if "forkserver" not in multiprocessing.get_all_start_methods():
            raise FedShuffleError(
                "worker processes need Linux or macOS. Use threads: the engine 'sequential:2'."
            )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fedshuffle.engines"])
        self.connection, theirs = context.Pipe()
        mine = work, theirs, os.environ | _ONE_THREAD, args
        self.process = context.Process(target=_run, args=mine, daemon=daemon)
        try:
            with theirs, _clean_start():
                self.process.start()
        except (EOFError, OSError) as error:
            self.connection.close()
            raise FedShuffleError(
                f"no worker process can be started ({type(error).__name__}: {error}). Use threads:"
                " the engine 'sequential:2'."
            ) from error

    def send(self, message: object) -> None:
        """Send a message. If the worker is dead, that shows when it should answer."""
        with contextlib.suppress(ConnectionError):
            self.connection.send_bytes(pickle.dumps(message, protocol=5))

    def receive(self) -> Any:
        """The next message; EOFError or ConnectionError if the worker is dead."""
        return pickle.loads(self.connection.recv_bytes())

    def end(self, patience: float = 0.0) -> int | None:
        """Kill the worker unless it ends within some seconds; its exit code."""
        self.process.join(patience)
        self.process.kill()
        self.process.join()
        self.connection.close()
        return self.process.exitcode


@contextlib.contextmanager
def _clean_start() -> Iterator[None]:
    """Let the fork server and its workers inherit nothing of the program but what they need.

    They start no threads of libraries, and leave Ctrl-C to the program. And they do not import the
    user's script: multiprocessing would, in every worker, if ``__main__`` had a name or a file. But
    nothing needs it there, since models and losses travel by cloudpickle.
    """
    main = vars(sys.modules["__main__"])
    with _lock:
        hidden = {name: main.pop(name) for name in {"__spec__", "__file__"} & main.keys()}
        before = {name: os.environ.get(name) for name in _SERVER}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        main["__spec__"] = None
        os.environ.update(_SERVER)
        try:
            yield
        finally:
            main.update(hidden)
            os.environ.update({name: value for name, value in before.items() if value is not None})
            for name in (name for name, value in before.items() if value is None):
                del os.environ[name]
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _run(
    work: Callable[..., None], connection: Connection, variables: dict[str, str], args: Any
) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(variables)
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        work(connection, *args)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
