"""A run that is done, in a few lines."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fedshuffle.config.running import command
from fedshuffle.evaluation import ClientTable
from fedshuffle.runs import FACTS
from fedshuffle.training import Result


def summary(result: Result) -> dict[str, Any]:
    """What a program wants to know of a run: how far it came, how well, and where it lies."""
    last, out = result.history[-1], Path(result.out or "")
    metrics = {name: value for name, value in last.items() if name not in FACTS}
    return {
        "rounds": last["round"],
        "diverged": result.diverged,
        "metrics": {k: None if math.isnan(value) else value for k, value in metrics.items()},
        "worst_clients": [] if result.clients is None else result.clients.worst().to_dict(),
        "out": str(out),
        "model": str(out / "model.safetensors"),
    }


def _worst(clients: ClientTable, out: Path) -> list[str]:
    """The clients that the model serves worst; what is undefined is said as well."""
    metric = clients.judged_by
    few = clients.worst(3)
    shown = ", ".join(f"{c} {v:.4g}" for c, v in zip(few.clients, few.metrics[metric]))
    lines = [f"Clients with the worst {metric}: {shown}. All are in {out / 'clients.csv'}."]
    return lines + [f"  {note}" for note in clients.notes]


def print_run(console: Console, result: Result, address: str | None = None) -> None:
    """How far a run came, how well, where it lies, and how to use it and go on: on the Ray cluster
    at an address, if it was there.
    """
    found = summary(result)
    lines = [f"{found['rounds']} rounds are done."]
    if result.diverged:
        lines = [f"Diverged: {result.diverged}. Lower the step size and begin again."]
    for name, value in found["metrics"].items():
        lines.append(f"  {name} " + ("is not finite" if value is None else f"{value:.4g}"))
    if result.clients is not None and len(result.clients) > 1:
        lines += _worst(result.clients, Path(found["out"]))
    lines += [
        f"Metrics, checkpoints and the config are in {found['out']}. To load the model:",
        f"  model = fedshuffle.load_model({found['out']!r})",
    ]
    if not result.diverged:
        again = command(Path(found["out"]), address)
        lines += ["For more rounds:", f"  {again} --rounds {2 * found['rounds']}"]
    for line in lines:
        console.print(escape(line), highlight=False, soft_wrap=True)
