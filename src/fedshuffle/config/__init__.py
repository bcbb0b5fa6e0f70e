"""One TOML file describes a run: read it, vary it, run it, go on with it.

In short:

    config = fedshuffle.config.load("config.toml")
    result = config.run("out")
    longer = fedshuffle.config.resume("out", rounds=200)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedshuffle.config.reading import load, setting
from fedshuffle.config.settings import Checkpoints, Config, Evaluating, Scheduled, Store, Use

if TYPE_CHECKING:
    from fedshuffle.training import Result

__all__ = [
    "Checkpoints",
    "Config",
    "Evaluating",
    "Scheduled",
    "Store",
    "Use",
    "begun",
    "load",
    "resume",
    "setting",
]


def begun(folder: Path | str) -> bool:
    """Whether a folder holds a run that has begun, and so can go on."""
    return (Path(folder) / "run.json").exists()


def resume(
    folder: Path | str,
    *,
    rounds: int | None = None,
    progress: bool = False,
    address: str | None = None,
) -> Result:
    """Go on with the run in a folder, as the config in that folder says, perhaps for longer.

    The address is that of a Ray cluster, for a run whose engine works on one.
    """
    from fedshuffle.config import running

    return running.resume(Path(folder), rounds, progress=progress, address=address)
