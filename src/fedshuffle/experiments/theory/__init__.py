"""Experiment: the theory's claims, measured."""

from __future__ import annotations

from pathlib import Path

from fedshuffle._files import results_folder
from fedshuffle.experiments.claims import Claim, publish
from fedshuffle.experiments.theory import figures
from fedshuffle.experiments.theory.claims import claims, reading
from fedshuffle.experiments.theory.experiment import Scale, compute


def reproduce(out: Path, scale: Scale | None = None, progress: bool = True) -> list[Claim]:
    """Measure all panels; write ``theory.png``, ``bounds.png``, the same as ``.pdf``,
    ``results.json`` and ``claims.md``.
    """
    out = results_folder(out)
    results = compute(scale, progress)
    found = claims(results)
    figures.figure(results, out / "theory")
    figures.bounds(results, out / "bounds")
    title = "What the theory says, and what was measured"
    publish(found, results, out, title, reading(found), progress)
    return found
