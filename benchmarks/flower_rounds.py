"""What a round on Flower costs the server: our own work, as a ratio to Flower's.

A deployment on this machine (SuperLink and three SuperNodes, TLS, node keys) trains models of
growing size. The server's own time is what the strategy spends on orders, on reading, checking and
spooling updates, and on the sums; Flower's is what its grid spends on pushing and pulling messages.
Waiting for clients counts for neither.

    python benchmarks/flower_rounds.py
    python benchmarks/flower_rounds.py --parameters 10000 1000000 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from fedshuffle.flower.local import Deployment
from fedshuffle.flower.new_app import new_app

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
            begun = time.perf_counter()
            try:
                return found(*args)
            finally:
                self.seconds += time.perf_counter() - begun

        return timed
'''


def made(folder: Path, parameters: int) -> Path:
    """The app of `fedshuffle new flower-app`, with a larger model and a watch on the grid."""
    app = new_app(folder / f"app{parameters}")
    package = app / app.name
    (package / "model.py").write_text(_MODEL.format(parameters=parameters))
    (package / "timed.py").write_text(_TIMED)
    server = package / "server_app.py"
    text = server.read_text().replace(
        "    result = strategy.start(\n        grid,",
        "    timed = TimedGrid(grid)\n    seen = [0.0]\n\n"
        "    def evaluate(round, arrays):\n"
        "        spent, seen[0] = timed.seconds - seen[0], timed.seconds\n"
        '        return MetricRecord({"grid_seconds": spent})\n\n'
        "    result = strategy.start(\n        timed,",
    )
    server.write_text(text.replace("from .data", "from .timed import TimedGrid\nfrom .data"))
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--parameters", type=int, nargs="+", default=[10_000, 1_000_000, 12_000_000]
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(
        f"{'parameters':>10} {'round s':>8} {'Flower s':>9} {'ours s':>8} {'ours/Flower':>11}"
        f" {'ours/round':>10}"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(3, progress=lambda line: print(line, file=sys.stderr)) as deployment,
    ):
        for parameters in arguments.parameters:
            out = Path(folder) / f"out{parameters}"
            config = {"num-rounds": arguments.rounds, "sampling": "full", "out": str(out)}
            run = deployment.run(made(Path(folder), parameters), config)
            if not run.completed:
                sys.exit(run.log)
            records = [
                json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
            ]
            records = records[1:] or records  # the first has the clients' introduction in its grid
            whole, flower, own = (
                statistics.median(record[name] for record in records)
                for name in ("seconds", "grid_seconds", "server_seconds")
            )
            print(
                f"{parameters:>10} {whole:8.2f} {flower:9.3f} {own:8.4f} {own / flower:11.1%}"
                f" {own / whole:10.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
