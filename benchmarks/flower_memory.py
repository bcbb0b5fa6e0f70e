"""The peak memory of a Flower server by the size of the cohort; it must not grow with it.

The clients are hollow: each answers with an update of zeros, made when it is pulled, so that what
is measured is the strategy's alone. Every cohort is a process of its own.

    python benchmarks/flower_memory.py
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedshuffle.auditing.adapters import ensure_identity
from fedshuffle.flower import FedShuffleStrategy, protocol


class HollowGrid(Grid):  # type: ignore[misc]
    """As many nodes as clients, which do nothing."""

    def __init__(self, clients: int, parameters: int) -> None:
        self.clients, self.parameters = clients, parameters
        self._sent: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self.clients + 1)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(id := f"{len(self._sent)}-{message.metadata.dst_node_id}")
            message.metadata.__dict__["_message_id"] = id
            message.content = RecordDict({})  # it is on its way
            self._sent[id] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._reply(self._sent.pop(id)) for id in message_ids]

    def _reply(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - 1
        if message.metadata.message_type == protocol.INFO:
            shape = {"x": [self.parameters]}
            content = protocol.content(protocol.ClientInfo(client, shape, "float32", {}, {}, 1))
        else:
            update = protocol.arrays(update=torch.zeros(self.parameters))
            content = protocol.content(protocol.Reply(client, 1), update)
        return Message(content, reply_to=message)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        raise NotImplementedError


def one(cohort: int, parameters: int) -> None:
    """Two rounds of one cohort; prints peak memory before and after, and seconds."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ensure_identity()
    start = ArrayRecord({"x": torch.zeros(parameters)})
    strategy = FedShuffleStrategy(cohort)
    begun = time.perf_counter()
    strategy.start(HollowGrid(cohort, parameters), start, 2)
    seconds = time.perf_counter() - begun
    print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cohorts", type=int, nargs="+", default=[16, 256, 4096])
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--one", type=int)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one, arguments.parameters)
        return
    size = arguments.parameters * 4 / 2**20
    print(f"{arguments.parameters} parameters: an update has {size:.1f} MiB")
    print(f"{'cohort':>7} {'all updates MiB':>16} {'peak MiB above start':>21} {'s a round':>10}")
    for cohort in arguments.cohorts:
        words = [sys.executable, __file__, "--one", str(cohort)]
        words += ["--parameters", str(arguments.parameters)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        before, after, seconds = map(float, done.stdout.split()[-3:])
        print(
            f"{cohort:>7} {cohort * size:16.0f} {after - before:21.0f} {seconds / 2:10.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
