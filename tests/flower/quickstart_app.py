"""The quickstart app before and after the lines of the migration page, run without a network."""

import importlib
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from tests.flower.grid import LocalGrid

BEFORE = Path(__file__).parent / "quickstart"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "migrate-a-flower-app.md"

SIZES = [8, 24, 64]
"""The numbers of examples of the app's clients, in minibatches of 8."""


def momentum(steps: int) -> float:
    """How far these steps of torch's SGD with momentum 0.9 go along a gradient of one."""
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([x], lr=1.0, momentum=0.9)
    for _ in range(steps):
        x.grad = torch.ones_like(x)
        optimiser.step()
    return -x.item()


def counted(epochs: int = 1) -> list[float]:
    """How much each client counts with FedAvg: by its size, and by how far it goes."""
    far = [size * momentum(epochs * size // 8) for size in SIZES]
    return [each / sum(far) for each in far]


def changes() -> list[tuple[str, str, str]]:
    """The changes that the page shows: the file, its lines before, and after."""
    found = []
    for block in re.findall(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        title, *lines = block.splitlines()
        before, after = (
            "\n".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +")
        )
        found.append((title.removeprefix("# "), before, after))
    return found


def migrate(folder: Path) -> Path:
    """The app in a new folder, with the lines of the page changed."""
    shutil.copytree(BEFORE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in changes():
        file = folder / "quickstart" / name
        text = file.read_text(encoding="utf-8")
        assert text.count(f"{before}\n") == 1, before
        file.write_text(text.replace(before, after), encoding="utf-8")
    return folder


@contextmanager
def imported(app: Path) -> Iterator[tuple[Any, Any, Any]]:
    """The modules ``task``, ``client_app`` and ``server_app`` of an app."""
    sys.path.insert(0, str(app))
    try:
        names = ("task", "client_app", "server_app")
        task, client, server = (importlib.import_module(f"quickstart.{name}") for name in names)
        yield task, client, server
    finally:
        sys.path.remove(str(app))
        for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
            del sys.modules[name]


def shares(model: Path) -> list[float]:
    """How much each client counted, by the model of the last round."""
    moved = load_file(model)["fc.weight"].double().flatten()
    return [float(share) for share in moved / moved.sum()]


def run(app: Path, out: Path, **config: Any) -> list[float]:
    """Run an app in this process; returns how much each client counted."""
    defaults = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
    settings = {**defaults["tool"]["flwr"]["app"]["config"], "out": str(out), **config}
    with imported(app) as (task, client, server):
        assert task.SIZES == SIZES
        grid = LocalGrid([client.app] * len(SIZES))
        for k in range(len(SIZES)):
            grid.contexts[k] = Context(1, k, {"partition-id": k}, RecordDict({}), settings)
        server.app(grid, Context(1, 0, {}, RecordDict({}), settings))
    return shares(out)
