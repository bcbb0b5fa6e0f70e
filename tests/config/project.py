"""A user's project: a module and a config."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]

MODULE = """
import torch
from fedshuffle import Federation, methods

def model(width=2):
    return torch.nn.Linear(3, width)

def data(n=3):
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(6 * n, 3, generator=generator), torch.arange(6 * n) % 2
    sizes = [k * 12 // (n + 1) for k in range(1, n + 1)]
    return Federation.from_arrays(inputs, labels, sizes=sizes)

def loss(model, inputs, labels, smoothing=0.0):
    return torch.nn.functional.cross_entropy(model(inputs), labels, label_smoothing=smoothing)

def needy(width):
    return torch.nn.Linear(3, width)

def failing():
    raise RuntimeError("no such disk\\nnor such cable")

def wrong():
    return 3

METHOD = methods.get("fedavg-rr")
"""

CONFIG = """
rounds = 7
seed = 3
sampling = "uniform:2"
step_size = 0.2
momentum = "mvr:0.5"
out = "run"

[model]
use = "mine:model"

[loss]
use = "mine:loss"

[data]
use = "mine:data"

[work]
epochs = "1..2"
batch_size = 2

[evaluation]
data = "training"
every = 2

[checkpoints]
every = 3
"""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.endswith("seconds")} for line in lines
    ]
