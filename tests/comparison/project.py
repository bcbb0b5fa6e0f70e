"""A user's project: a module and the file of a comparison, with a closed form."""

import json
from pathlib import Path
from typing import Any

from fedshuffle.comparison.runner import Study

# Four clients with one example each: with full participation every method does gradient descent on
# 1/2 |x - x*|^2 and a constant. Files in its folder disturb the processes.
MODULE = """
import os, time
from pathlib import Path
import torch
from fedshuffle import Federation, methods

HERE, calls = Path(__file__).parent, 0

class Point(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

def data():
    points = [[0.0, 1.0], [2.0, 1.0], [1.0, 0.0], [1.0, 2.0]]
    return Federation.from_arrays(torch.tensor(points, dtype=torch.float64), sizes=[1] * 4)

def loss(model, points):
    global calls
    calls += 1
    hold, die = HERE / "hold", HERE / "die"
    if hold.exists() and calls > int(hold.read_text()):
        (HERE / f"held-{os.getpid()}").touch()
        time.sleep(600)
    if torch.is_grad_enabled() and die.exists() and int(die.read_text()):
        die.write_text(str(int(die.read_text()) - 1))
        os._exit(9)
    if torch.is_grad_enabled() and (HERE / "raise").exists():
        raise RuntimeError("no such cable")
    print("a user's module may print")
    return 0.5 * (model.x - points).square().sum(1).mean()

MINE = methods.get("fedshuffle")
"""

CONFIG = """
rounds = 12
out = "out"

[model]
use = "mine:Point"

[loss]
use = "mine:loss"

[data]
use = "mine:data"

[evaluation]
data = "training"
metrics = ["loss"]
every = 3
per_client = false
training = 2

[checkpoints]
every = 1

[compare]
methods = ["fedavg-rr", "fedshuffle"]
seeds = [0, 1]
step_sizes = [0.1, 1.9, 1.0, 4.0, 1e200]
common_step_sizes = [0.1, 4.0]

[compare.tune]
rounds = 6
"""

START, FLOOR = 1.5, 0.5
"""The loss at 0, and the part of it that no x can avoid; x* is (1, 1)."""


def closed_form(step_size: float, rounds: int) -> float:
    return FLOOR + (1 - step_size) ** (2 * rounds)


def project(folder: Path, config: str = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(MODULE)
    (folder / "compare.toml").write_text(config)
    return folder / "compare.toml"


def outcomes(out: Path) -> dict[str, str]:
    found = (out / "runs").glob("*/outcome.json")
    return {path.parent.name: json.loads(path.read_text())["outcome"] for path in found}


def write_run(study: Study, trial: Any, outcome: str, value: float | None) -> None:
    study.prepare(trial)
    folder = study.folder(trial)
    (folder / "run.json").write_text("{}")
    record = {"round": trial.config.rounds, "accuracy": value, "evaluation_seconds": 0.1}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "outcome.json").write_text(json.dumps({"outcome": outcome, "reason": "so"}))
