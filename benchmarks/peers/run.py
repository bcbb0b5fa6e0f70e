"""Other libraries against fedshuffle and a bare PyTorch loop, on the same work.

    make bench-peers
    make bench-peers ARGS="--works mlp,cnn --peers pfl,flwr --blocks 3 --json peers.json"

Every peer gets a virtual environment of its own, with the versions in ``<peer>.txt``, and a process
of its own per work, held to one core and one thread. The processes take turns block by block, and
while one works the others are stopped; speeds drift, but they drift for all. Printed is the median
over the blocks of a contestant's local steps per second over the bare loop's in the same block.

A round is 16 of 200 clients, two epochs each in batches of 32, averaged by examples, and counts as
``2 ceil(n / 32)`` local steps for a client of n examples whatever the contestant makes of it.
Start-up is the time from the start of the process to the end of its first round. Peak memory is
summed over the processes of a contestant.

Where a plain ``torch`` from the registry is a CUDA build, point pip to the CPU one first
(``PIP_EXTRA_INDEX_URL``): the environments hold no CUDA libraries.
"""

import argparse
import contextlib
import hashlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import work
from turns import descendants

HERE = Path(__file__).parent
BENCH = HERE.parent.parent / ".bench"
PEERS = ("flwr", "pfl", "fedjax", "flsim")
ROUNDS = {"logreg": 10, "mlp": 8, "cnn": 1, "lstm": 1}
"""Rounds in a block, enough that it lasts some tenths of a second at least."""
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_HOME": str(BENCH / "flwr-home"),
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""The environment of the contestants: one thread, no accelerator, nothing reported to anybody."""
REMARKS = {
    "flwr": "runs Ray beside its own process, on the same core, with one worker.",
    "fedjax": "fills its batches across epochs: it takes 0.89 (texts: 0.70) of the steps counted.",
    "pfl": "does not reshuffle between epochs.",
    "flsim": "does not reshuffle between epochs.",
}
PATIENCE = 900.0
"""Seconds after which a contestant that does not answer has failed."""


class ContestantError(Exception):
    """A contestant cannot take part; the reason in one line."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def last_line(text: str) -> str:
    """What an unsuccessful program said in the end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1][:300]


def environment(peer: str) -> Path:
    """The Python of a peer's environment, which is built where it is not up to date."""
    home, lock = BENCH / peer, HERE / f"{peer}.txt"
    python, stamp = home / "bin" / "python", home / "installed"
    wanted = hashlib.sha256(lock.read_bytes()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == wanted):
        say(f"{peer}: installing")
        commands: list[list[str | Path]] = [
            [sys.executable, "-m", "venv", "--clear", home],
            [python, "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", lock],
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise ContestantError(f"cannot be installed: {last_line(done.stderr)}")
        stamp.write_text(wanted)
    return python


@dataclass
class Contestant:
    """One process that plays rounds of one work when told to."""

    name: str
    command: Sequence[str | Path]
    log: Path
    core: int | None
    answers: list[dict[str, Any]] = field(default_factory=list)
    startup: float = 0.0

    def start(self) -> None:
        """Start the process and play one round."""
        begun = time.perf_counter()

        def pin() -> None:
            if self.core is not None:
                os.sched_setaffinity(0, {self.core})

        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=pin,
                env=os.environ | SETTINGS,
                cwd=BENCH,
            )
        self.ask(1)
        self.startup = time.perf_counter() - begun

    def ask(self, rounds: int) -> None:
        """Let it play, and keep its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{rounds}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.ended() from None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        if not ready:
            raise ContestantError(f"did not answer in {PATIENCE:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise self.ended()
        answer = json.loads(line)
        if "error" in answer:
            raise ContestantError(answer["error"])
        self.answers.append(answer)

    def ended(self) -> ContestantError:
        said = last_line(self.log.read_text(errors="replace"))
        return ContestantError(f"ended with code {self.process.wait(30)}: {said}")

    def turn(self, rounds: int) -> None:
        """Go on, play, stop: what the frameworks do when idle must not cost the others."""
        self.signal(signal.SIGCONT)
        self.ask(rounds)
        self.signal(signal.SIGSTOP)

    def signal(self, what: signal.Signals) -> None:
        """To the process and to all that it has started."""
        for pid in (*descendants(self.process.pid), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)

    def end(self) -> None:
        """Close its input, which ends it; by force where it does not."""
        assert self.process.stdin is not None
        self.signal(signal.SIGCONT)
        try:
            self.process.stdin.close()
            self.process.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.signal(signal.SIGKILL)
            self.process.wait()

    def speed(self, block: int) -> float:
        answer = self.answers[block + 1]  # the first answer is of the start-up
        return float(answer["steps"] / answer["seconds"])


def lineup(peers: Sequence[str], engine: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The commands of all that can take part, and why others cannot."""
    scripts = {
        "bare": (Path(sys.executable), "bare", []),
        "bare, torch.optim": (Path(sys.executable), "bare", ["optim"]),
        f"fedshuffle, {engine}": (Path(sys.executable), "fedshuffle_", [engine]),
    }
    commands, reasons = {}, {}
    for name in (*scripts, *peers):
        try:
            python, module, extra = scripts.get(name) or (environment(name), f"{name}_", [])
            # whether it can be imported; which also brings its files into memory for the start-up
            tried = subprocess.run(
                [python, "-c", f"import {module}"], cwd=HERE, capture_output=True, text=True
            )
            if tried.returncode:
                raise ContestantError(f"cannot be imported: {last_line(tried.stderr)}")
            commands[name] = [str(python), str(HERE / f"{module}.py"), *extra]
        except ContestantError as failure:
            reasons[name] = str(failure)
    if "bare" in reasons:
        raise ContestantError(f"the bare loop {reasons['bare']}")
    return commands, reasons


def measure(work: str, commands: dict[str, list[str]], blocks: int) -> dict[str, dict[str, Any]]:
    """All contestants in turns on one work; for each its numbers, or why it failed."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None]
    found: dict[str, dict[str, Any]] = {}
    playing: list[Contestant] = []

    def attempt(contestant: Contestant, rounds: int | None) -> None:
        try:
            if rounds is None:
                contestant.start()
                contestant.signal(signal.SIGSTOP)
            else:
                contestant.turn(rounds)
        except ContestantError as failure:
            say(f"{work}: {contestant.name}: {failure}")
            found[contestant.name] = {"failed": str(failure)}
            playing.remove(contestant)
            contestant.end()

    try:
        for name, (python, script, *extra) in commands.items():
            log = BENCH / "logs" / f"{work}-{name.replace(', ', '-')}.txt"
            command = [python, script, str(BENCH / "data"), work, *extra]
            playing.append(Contestant(name, command, log, cores[-1]))
            say(f"{work}: starting {name}")
            attempt(playing[-1], None)
        for block in range(blocks):
            say(f"{work}: block {block + 1} of {blocks}")
            for contestant in tuple(playing):
                attempt(contestant, ROUNDS[work])
    finally:
        for contestant in playing:
            contestant.end()
    if "bare" in found:
        raise ContestantError(f"{work}: the bare loop failed: {found['bare']['failed']}")
    bare = playing[0]
    for contestant in playing:
        speeds = [contestant.speed(block) for block in range(blocks)]
        ratios = [speed / bare.speed(block) for block, speed in enumerate(speeds)]
        found[contestant.name] = {
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "steps_per_second": statistics.median(speeds),
            "startup_s": contestant.startup,
            "peak_mb": max(answer["peak_mb"] for answer in contestant.answers),
            "note": contestant.answers[-1]["note"],
        }
    return found


def label(name: str) -> str:
    """A peer's name with its version."""
    if name not in PEERS:
        return name
    lock = (HERE / f"{name}.txt").read_text().splitlines()
    return next(line.replace("==", " ") for line in lock if line.startswith(f"{name}=="))


def table(found: dict[str, dict[str, dict[str, Any]]], reasons: dict[str, str]) -> str:
    """One row a contestant; below it who failed and why, and what to know of some."""
    works = list(found)
    names = [*dict.fromkeys(name for cells in found.values() for name in cells), *reasons]
    rows = [["", *works, "start-up, s", "peak, MB"]]
    remarks = []
    for name in sorted(names, key=lambda name: (name in PEERS, name)):
        row = [label(name)]
        cells = [found[work].get(name, {}) for work in works]
        row += [f"{cell['ratio']:.2f}" if "ratio" in cell else "failed" for cell in cells]
        for key, form in (("startup_s", ".1f"), ("peak_mb", ".0f")):
            row.append("/".join(f"{cell[key]:{form}}" if key in cell else "-" for cell in cells))
        rows.append(row)
        if name in reasons:
            remarks.append(f"{name} {reasons[name]}")
        said = [cell.get("failed") or cell.get("note") for cell in cells]
        remarks += [f"{name}, {work}: {text}" for work, text in zip(works, said) if text]
        remarks += [f"{name} {REMARKS[name]}"] if name in REMARKS else []
    speeds = [f"{found[work]['bare']['steps_per_second']:,.0f}" for work in works]
    rows.insert(1, ["bare, steps/s", *speeds, "", ""])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        row[0].ljust(widths[0])
        + "".join(cell.rjust(width + 2) for cell, width in zip(row[1:], widths[1:]))
        for row in rows
    ]
    return "\n".join(lines + [f"- {remark}" for remark in remarks])


def listed(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads names with commas between them."""

    def read(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        return names

    return read


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Other libraries on the same work.")
    parser.add_argument("--works", type=listed(tuple(work.DATA)), default=list(work.DATA))
    parser.add_argument("--peers", type=listed(PEERS), default=list(PEERS))
    parser.add_argument("--blocks", type=at_least_one, default=7)
    parser.add_argument("--engine", default="auto", help="fedshuffle's engine")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nobody is left behind, stopped
    (BENCH / "logs").mkdir(parents=True, exist_ok=True)
    work.save(BENCH / "data")
    try:
        commands, reasons = lineup(options.peers, options.engine)
        found = {name: measure(name, commands, options.blocks) for name in options.works}
    except ContestantError as failure:
        sys.exit(f"error: {failure}")
    print(table(found, reasons))
    if options.json:
        options.json.write_text(json.dumps({"works": found, "absent": reasons}, indent=2) + "\n")


if __name__ == "__main__":
    main()
