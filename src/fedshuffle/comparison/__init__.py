"""Comparisons: methods x momentum x seeds from one file, each method at its best step sizes.

In short:

    comparison = fedshuffle.comparison.load("compare.toml")
    results = comparison.run("out")  # call it again after an interruption to resume
"""

from fedshuffle.comparison.spec import Comparison, GridPoint, Tuning, load
from fedshuffle.comparison.variants import Variant

__all__ = ["Comparison", "GridPoint", "Tuning", "Variant", "load"]
