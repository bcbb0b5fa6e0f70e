"""Looking at other processes: waiting for them, and where they listen."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LOOPBACK = {  # as Linux writes 127.0.0.1, the same within IPv6, and ::1
    "0100007F",
    "0000000000000000FFFF00000100007F",
    "00000000000000000000000001000000",
}


PATIENCE = 400.0
"""Seconds after which a test fails that waits for another process."""


def wait_for(
    condition: Callable[[], bool], what: str, process: subprocess.Popen[Any] | None = None
) -> None:
    """Wait until something is so, while a process runs of which it is expected."""
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < limit, f"waited too long for {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has buried yet does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def with_environment(text: str) -> list[int]:
    """The processes with this text in their environment (Linux)."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
    return [pid for pid in found if pid != os.getpid()]


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """The addresses, as in /proc/net, and ports at which these processes listen."""
    owned = set()
    for pid in pids:
        try:
            handles = list(Path(f"/proc/{pid}/fd").iterdir())
        except FileNotFoundError:  # it has ended
            continue
        for handle in handles:
            try:
                owned.add(os.readlink(handle))
            except FileNotFoundError:
                continue
    heard = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in owned:
                address, port = words[1].split(":")
                heard.add((address, int(port, 16)))
    return heard
