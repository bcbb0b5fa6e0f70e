"""What a round on Flower costs the server beyond what Flower's own FedAvg would.

A deployment on this machine (SuperLink and three SuperNodes, TLS, node keys) trains models of
growing size. Ours is what the strategy spends on orders, on reading, checking and keeping updates,
and on the sums. Flower's own is what the SuperLink spends, its grid in the server app on pushing
and pulling messages, and its FedAvg on aggregating as many. All but the whole round are computing
time: waiting, for clients and for the processor that they share with the server, is nobody's.

    python benchmarks/flower_rounds.py
    python benchmarks/flower_rounds.py --parameters 10000 1000000 --rounds 3
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedshuffle.auditing.adapters import ensure_identity
from fedshuffle.flower.local import COMPLETED, Deployment
from fedshuffle.templates import new_flower_app

CLIENTS = 3

_MODEL = '''"""One wide layer."""

import torch
from torch import nn

PARAMETERS = {parameters}


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    width = max(1, PARAMETERS // 74)
    return nn.Sequential(nn.Linear(64, width, bias=False), nn.Linear(width, 10, bias=False))
'''

_TIMED = '''"""A grid that says how long its work took."""

import time


class TimedGrid:
    def __init__(self, grid):
        self._grid, self.seconds = grid, 0.0

    def __getattr__(self, name):
        found = getattr(self._grid, name)
        if name not in ("push_messages", "pull_messages"):
            return found

        def timed(*args):
            begun = time.process_time()
            try:
                return found(*args)
            finally:
                self.seconds += time.process_time() - begun

        return timed
'''


def made(folder: Path, parameters: int) -> Path:
    """The app of `fedshuffle new flower-app`, with a larger model and a watch on the grid."""
    app = new_flower_app(folder / f"app{parameters}")
    package = app / app.name
    (package / "model.py").write_text(_MODEL.format(parameters=parameters))
    (package / "timed.py").write_text(_TIMED)
    server = package / "server_app.py"
    text = server.read_text().replace(
        "    result = strategy.start(\n        grid,",
        "    timed = TimedGrid(grid)\n    seen = [0.0, 0.0]\n\n"
        "    def evaluate(round, arrays):\n"
        "        now = timed.seconds, time.process_time()\n"
        "        grid, all = (after - before for after, before in zip(now, seen))\n"
        "        seen[:] = now\n"
        '        return MetricRecord({"grid_seconds": grid, "server_seconds": all - grid})\n\n'
        "    result = strategy.start(\n        timed,",
    )
    server.write_text(
        text.replace("from .data", "import time\nfrom .timed import TimedGrid\nfrom .data")
    )
    return app


def computed(pid: int) -> float:
    """The computing time of a process so far, in seconds (Linux)."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def fedavg_seconds(parameters: int, clients: int) -> float:
    """What Flower's own FedAvg takes to aggregate as many updates: the median of five."""
    numbers = MetricRecord({"num-examples": 1})
    times = []
    ensure_identity()
    asked = Message(RecordDict({}), dst_node_id=1, message_type="train")
    for _ in range(5):
        replies = []
        for _ in range(clients):
            arrays = ArrayRecord({"x": Array(np.zeros(parameters, np.float32))})
            content = RecordDict({"arrays": arrays, "metrics": numbers})
            replies.append(Message(content, reply_to=asked))
        begun = time.process_time()
        FedAvg().aggregate_train(1, replies)
        times.append(time.process_time() - begun)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--parameters", type=int, nargs="+", default=[10_000, 1_000_000, 12_000_000]
    )
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    print("seconds  parameters   round  SuperLink    grid  FedAvg    ours  beyond Flower's own")
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(CLIENTS, progress=lambda line: print(line, file=sys.stderr)) as deployment,
    ):
        for parameters in arguments.parameters:
            out = Path(folder) / f"out{parameters}"
            config = {"num-rounds": arguments.rounds, "sampling": "full", "out": str(out)}
            superlink = deployment.processes["superlink"].pid
            before = computed(superlink)
            status = deployment.run(made(Path(folder), parameters), config)
            link = (computed(superlink) - before) / arguments.rounds
            if status != COMPLETED:
                sys.exit(status)
            lines = (out / "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines][1:]  # the first warms up
            whole, grid, own = (
                statistics.median(record[name] for record in records)
                for name in ("seconds", "grid_seconds", "server_seconds")
            )
            fedavg = fedavg_seconds(parameters, CLIENTS)
            print(
                f"{parameters:19} {whole:7.2f} {link:10.3f} {grid:7.3f} {fedavg:7.3f} {own:7.3f}"
                f" {(own - fedavg) / (link + grid + fedavg):20.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
