"""The processes of a deployment on this machine: start, watch and stop them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from fedshuffle._terminal import signals
from fedshuffle.errors import FedShuffleError

HOST = "127.0.0.1"
MARK = "FEDSHUFFLE_DEPLOYMENT"
"""The environment variable that marks every process of a deployment with its folder."""
KEYS = "keys"
"""The folder of a deployment with its certificates and private keys."""
_WATCH = """
import sys
sys.path[:] = sys.argv[3:]
from pathlib import Path
from fedshuffle.flower.processes import watch
watch(Path(sys.argv[1]), bool(sys.argv[2]))
"""
_STOP = 15.0  # seconds between asking a process to end and killing it


class Process:
    """A process of a deployment, in its own session, with a log."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._begins = out.tell()
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,  # so that Ctrl-C does not reach it
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None as long as it runs."""
        return self._popen.poll()

    def output(self) -> str:
        """What it printed since it was started."""
        with self.log.open("rb") as file:
            file.seek(self._begins)
            return file.read().decode("utf-8", "replace")

    def check(self) -> None:
        """Raise an error with the end of the log if the process has ended."""
        if self.exit_code is not None:
            raise FedShuffleError(
                f"{self.name} ended with exit code {self.exit_code}. {tail(self)}"
            )

    def ask_to_end(self) -> None:
        if self.exit_code is None:
            self._popen.terminate()

    def end(self, seconds: float = _STOP) -> None:
        """Wait for its end; kill it after these seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """Kill it and what it started in its session."""
        if self.exit_code is None:  # else the pid may belong to another process
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()


class Watcher:
    """A watchdog process that stops a deployment if this program is killed."""

    def __init__(self, folder: Path, temporary: bool) -> None:
        words = [str(folder), "temporary" if temporary else "", *sys.path]
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _WATCH, *words], stdin=subprocess.PIPE, start_new_session=True
        )

    def dismiss(self) -> None:
        """End the watchdog without any action."""
        with contextlib.suppress(BrokenPipeError):
            self._popen.communicate(b"in order")


def watch(folder: Path, temporary: bool) -> None:
    """Wait until the program dismisses the watchdog, or dies."""
    if not sys.stdin.buffer.read():
        sweep(folder, 0.0)
        if temporary:
            forget_keys(folder)


def sweep(folder: Path, seconds: float) -> None:
    """Wait until no process of a deployment is left; kill the rest after these seconds."""
    limit = time.monotonic() + seconds
    while left := marked(folder):
        if time.monotonic() >= limit:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def forget_keys(folder: Path) -> None:
    """Remove the keys of a deployment; its logs stay."""
    shutil.rmtree(folder / KEYS, ignore_errors=True)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the program as Ctrl-C does, with all cleanup."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with signals(end, signal.SIGTERM, signal.SIGHUP):
        yield


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def checked_port(port: int) -> int:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
    except (OSError, OverflowError) as error:
        raise FedShuffleError(
            f"port {port} of {HOST} is not available: {error}. Choose another, or leave it out for"
            " a free one."
        ) from error
    return port


def scripts() -> str:
    return sysconfig.get_path("scripts")


def tool(name: str) -> str:
    found = shutil.which(name, path=scripts()) or shutil.which(name)
    if found is None:
        raise FedShuffleError(
            f"the command {name!r} is missing. Install it with pip install 'fedshuffle[flower]'."
        )
    return found


def tail(process: Process, lines: int = 15) -> str:
    last = "\n".join(process.output().rstrip().split("\n")[-lines:])
    return f"The end of {str(process.log)!r}:\n{last}"


def marked(folder: Path) -> list[int]:
    """The processes that carry this deployment's mark."""
    wanted = f"{MARK}={folder}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return [pid for pid in found if pid != os.getpid()]
