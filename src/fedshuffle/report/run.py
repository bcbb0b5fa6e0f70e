"""A run that is done, in a few lines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fedshuffle.config.running import command
from fedshuffle.runs import FACTS
from fedshuffle.training import Result


def summary(result: Result) -> dict[str, Any]:
    """What a program wants to know of a run: how far it came, how well, and where it lies."""
    last, out = result.history[-1], Path(result.out or "")
    metrics = {name: value for name, value in last.items() if name not in FACTS}
    return {
        "rounds": last["round"],
        "metrics": {k: None if math.isnan(value) else value for k, value in metrics.items()},
        "out": str(out),
        "model": str(out / "model.safetensors"),
    }


def print_run(console: Console, result: Result, address: str | None = None) -> None:
    """How far a run came, how well, where it lies, and how to use it and go on: on the Ray cluster
    at an address, if it was there.
    """
    found = summary(result)
    lines = [f"{found['rounds']} rounds are done."]
    for name, value in found["metrics"].items():
        lines.append(f"  {name} " + ("is not finite" if value is None else f"{value:.4g}"))
    lines += [
        f"Metrics, checkpoints and the config are in {found['out']}. To load the model:",
        f"  model.load_state_dict(safetensors.torch.load_file({found['model']!r}))",
        "For more rounds:",
        f"  {command(Path(found['out']), address)} --rounds {2 * found['rounds']}",
    ]
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)
