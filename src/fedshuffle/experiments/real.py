"""Experiments on real data, each one comparison in a file beside this module.

``shakespeare.toml`` and ``cifar100.toml`` are the paper's; ``steps-shakespeare.toml``,
``steps-cifar100.toml`` and ``steps-plays.toml`` tune both step sizes of a family of methods, and so
does ``steps-synthetic.toml`` on generated data. Here is what they name: data, models, and two
methods in reshuffled order, in which the paper runs all methods on real data.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fedshuffle import comparison, methods
from fedshuffle._files import results_folder
from fedshuffle.data import datasets
from fedshuffle.experiments.plays import load as read_plays
from fedshuffle.federation import Federation
from fedshuffle.models import ResNet

FEDAVG_MIN = replace(methods.get("fedavg-min"), work={"steps": "min"})
FEDAVG_MEAN = replace(methods.get("fedavg-mean"), work={"steps": "mean"})

_VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "steps-synthetic-network": (
        "steps-synthetic",
        {
            "model": {"use": "fedshuffle.experiments.synthetic:network", "hidden": 32},
            "compare.title": "Two tuned step sizes, generated clients, network",
        },
    )
}
"""Experiments that are another one with some changes."""


def load(experiment: str, scale: str, out: Path, data: Path | None = None) -> comparison.Comparison:
    """One of the experiments at the scale ``paper``, ``laptop`` or ``smoke``, to be run
    into ``out``; with data sets from ``data``, if not from FEDSHUFFLE_DATA or the cache.
    """
    file, changes = _VARIATIONS.get(experiment, (experiment, {}))
    keys = ("data.folder", "evaluation.data.folder")
    places = dict.fromkeys(keys, str(data.resolve())) if data else {}
    path = Path(__file__).with_name(f"{file}.toml")
    found = comparison.load(path, changes | places, scale)
    # Nothing is imported from where the file lies, and the results can be moved about.
    return replace(found, base=replace(found.base, folder=results_folder(out)))


# The parts for training and for testing are read once.
_shakespeare = functools.lru_cache(maxsize=1)(datasets.shakespeare)
_cifar100 = functools.lru_cache(maxsize=1)(datasets.cifar100)
_plays = functools.lru_cache(maxsize=1)(read_plays)


def shakespeare(
    part: str = "train", clients: int | None = None, folder: str | None = None
) -> Federation:
    """Shakespeare's lines by speaker; a sample of the clients if ``clients`` is given."""
    federation = _shakespeare(folder)[part != "train"]
    return federation if clients is None else federation.sample(clients)


def cifar100(
    part: str = "train", clients: int = 500, per_client: int = 100, folder: str | None = None
) -> Federation:
    """CIFAR-100, split over clients by hierarchical LDA."""
    return _cifar100(folder, clients=clients, per_client=per_client)[part != "train"]


def plays(part: str = "train", features: int = 1024, folder: str | None = None) -> Federation:
    """Speeches of 37 plays by speaking character; is a speech verse or prose?

    See :func:`fedshuffle.experiments.plays.load`.
    """
    return _plays(folder, features)[part != "train"]


def resnet(width: int = 64, blocks: Sequence[int] = (2, 2, 2, 2), padding: int = 4) -> nn.Module:
    """ResNet-18 with group normalisation, which sees images cropped and mirrored at random."""
    return nn.Sequential(datasets.Augment(padding), ResNet(100, width, blocks))


def small_resnet(width: int = 16, blocks: Sequence[int] = (1, 1)) -> nn.Module:
    """A narrow and short ResNet, which sees images at half their resolution."""
    return nn.Sequential(nn.AvgPool2d(2), ResNet(100, width, blocks))
