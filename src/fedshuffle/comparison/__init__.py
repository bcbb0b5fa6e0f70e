"""Comparisons: methods x momentum x seeds from one file, each method at its best step size.

In short:

    comparison = fedshuffle.comparison.load("compare.toml")
    results = comparison.run("out")  # again after an interruption, and it goes on
"""

from __future__ import annotations

from fedshuffle.comparison.reading import load
from fedshuffle.comparison.settings import Comparison, Setting, Tuning

__all__ = ["Comparison", "Setting", "Tuning", "load"]
