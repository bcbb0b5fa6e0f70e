"""Worker processes forked from a clean process, never from the program itself.

A fork of a program whose threads have computed inherits the locks of its libraries (MKL, OpenMP)
but not the threads that would release them, and may wait for ever. So the program starts one fork
server: a new Python that imports torch, computes nothing and has a single thread. All workers are
forks of it, so they start at once and share its memory. (``multiprocessing`` has one, too, but
imports the user's script once more in every worker.)

No worker outlives the program: when it ends, in whatever way, the server kills all workers and
ends; and a worker dies with its server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle

from fedshuffle.errors import FedShuffleError

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Environment of a process whose libraries must not start threads."""

_PROGRAM = """
import sys
sys.path[:] = sys.argv[3:]
from fedshuffle.engines import forkserver, workers
forkserver.serve(int(sys.argv[1]), int(sys.argv[2]), workers.serve)
"""

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h

_server: ForkServer | None = None
_lock = threading.Lock()


def fork_server() -> ForkServer:
    """The fork server of this program, started if there is none."""
    global _server
    with _lock:
        if _server is None or _server.process.poll() is not None:
            _server = ForkServer()
        return _server


def _forget_server() -> None:
    """In a fork of the program: the server belongs to the parent."""
    global _server, _lock
    _server, _lock = None, threading.Lock()


class ForkServer:
    """The fork server, seen from the program."""

    def __init__(self) -> None:
        if os.name != "posix":
            raise FedShuffleError(
                "worker processes need Linux or macOS. Use threads: the engine 'sequential:2'."
            )
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(os.getpid()), *sys.path]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD},
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the program to handle
            )
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()
        self._owner = os.getpid()
        weakref.finalize(self, _close, self._owner, self._connection, self.process)

    def fork(self) -> tuple[int, Connection]:
        """Start a worker: its process id, and the connection to it."""
        ours, theirs = socket.socketpair()
        connection = Connection(ours.detach())
        try:
            with theirs:
                return self._ask(None, theirs.fileno()), connection
        except (EOFError, OSError) as error:
            connection.close()
            raise FedShuffleError(
                "the process from which worker processes are forked has ended"
                f" (exit code {self.process.returncode}). Use threads: the engine 'sequential:2'."
            ) from error

    def end(self, pid: int) -> int | None:
        """Kill a worker unless it has ended already; its exit code, or None if unknown."""
        if os.getpid() == self._owner:  # and not in a fork of the program
            with contextlib.suppress(EOFError, OSError):
                return self._ask(pid)
        return None

    def _ask(self, request: int | None, handle: int | None = None) -> int:
        with self._lock:
            try:
                self._connection.send(request)
                if handle is not None:
                    send_handle(self._connection, handle, None)
                answer: int = self._connection.recv()
            except BaseException:  # its next answer would be the one to this request
                self.process.kill()
                self.process.wait()
                raise
            return answer


def _close(owner: int, connection: Connection, process: subprocess.Popen[bytes]) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            connection.send(0)
        process.wait()
    connection.close()


def serve(handle: int, program: int, work: Callable[[Connection], None]) -> None:
    """Run the fork server: fork workers (None), kill them (their id), end (0)."""
    server, workers = os.getpid(), set[int]()
    watched: list[Connection | int] = [connection := Connection(handle)]
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # forks of the program may hold the connection open
            watched.append(os.pidfd_open(program))
    try:
        while wait(watched) == [connection]:
            match connection.recv():
                case None:
                    theirs = recv_handle(connection)
                    if not (pid := os.fork()):
                        connection.close()
                        _run_worker(server, Connection(theirs), work)
                    os.close(theirs)
                    workers.add(pid)
                    connection.send(pid)
                case 0:
                    return
                case pid:
                    workers.remove(pid)
                    connection.send(_killed(pid))
    except (EOFError, ConnectionError):  # the program is gone
        pass
    finally:
        for pid in workers:
            _killed(pid)


def _run_worker(server: int, connection: Connection, work: Callable[[Connection], None]) -> None:
    code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:
            work(connection)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # exit handlers are the server's


def _killed(pid: int) -> int:
    """Kill a worker unless it has ended already; its exit code."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if os.name == "posix":
    os.register_at_fork(after_in_child=_forget_server)
