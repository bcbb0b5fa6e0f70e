"""Experiment: the paper's toy figures."""

from __future__ import annotations

from pathlib import Path

from fedshuffle._arrays import count
from fedshuffle._files import results_folder
from fedshuffle.experiments.claims import Claim, publish
from fedshuffle.experiments.quadratic import figures
from fedshuffle.experiments.quadratic.claims import claims, reading
from fedshuffle.experiments.quadratic.experiment import compute


def reproduce(out: Path, rounds: int = 1000, progress: bool = True) -> list[Claim]:
    """Simulate all panels; write ``figure1``, ``hybrid``, ``results.json`` and ``claims.md``."""
    count(rounds, "rounds")
    out = results_folder(out)
    results = compute(rounds, progress)
    found = claims(results)
    figures.figure1(results, out / "figure1")
    figures.hybrid(results, out / "hybrid")
    title = "What the paper says about its toy figures"
    publish(found, results, out, title, reading(found, rounds), progress)
    return found
