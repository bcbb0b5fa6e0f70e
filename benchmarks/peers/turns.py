"""The contestant's side of a run: it plays rounds when it is told to, and answers in JSON.

The parent writes a number of rounds on a line of its own. The contestant plays them and writes one
line with the local steps, the seconds and the peak memory. The end of the input is the end.

A contestant with a loop of its own writes ``for round in turns``. One whose framework owns the loop
calls ``turns.next()`` where the framework lets it at the start of each round, and so is paused
there between its turns.
"""

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path


class NoMoreRoundsError(Exception):
    """The parent has closed the input: the end of a contestant whose framework owns the loop."""


class Turns:
    """Rounds on demand. Count the steps of every round in ``steps``."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the frameworks print goes to the log
        self._rounds: Iterator[int] | None = None
        self.steps = 0
        self.note = ""
        """What a reader of the table should know of this contestant."""

    def __iter__(self) -> Iterator[int]:
        round = 0
        for line in iter(sys.stdin.readline, ""):
            self.steps = 0
            begun = time.perf_counter()
            for _ in range(int(line)):
                yield round
                round += 1
            seconds = time.perf_counter() - begun
            if not self.steps:
                raise RuntimeError("no client was trained")
            self.answer(steps=self.steps, seconds=seconds, peak_mb=peak(), note=self.note)

    def next(self) -> int:
        """The next round, for frameworks that own the loop: call it where each round starts."""
        if self._rounds is None:
            self._rounds = iter(self)
        for round in self._rounds:
            return round
        raise NoMoreRoundsError

    def answer(self, **facts: object) -> None:
        print(json.dumps(facts), file=self._answers, flush=True)


def play(contestant: Callable[[Turns], None]) -> None:
    """Run a contestant to its end; whatever it raises is its answer."""
    turns = Turns()
    try:
        contestant(turns)
    except NoMoreRoundsError:
        pass
    except Exception as error:
        traceback.print_exc()
        reason = (str(error).strip().splitlines() or [""])[0]
        turns.answer(error=f"{type(error).__name__}: {reason}")
        sys.exit(1)


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def peak() -> float:
    """Peak memory in MB: of this process and, summed, of those it has started."""
    unit = 1 if sys.platform == "darwin" else 1024
    total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    for pid in descendants(os.getpid()):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return total / 1e6
