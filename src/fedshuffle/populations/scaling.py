"""Standardised inputs: columns with mean 0 and standard deviation 1 over the training rows.

Columns of very different sizes (age 50, pressure 120) make training hard: the largest one dictates
the step size. The statistics lie in the store, so that held-out rows are scaled by the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.populations.store import open_store

KEY = "standardised"
"""Where the statistics stand among what a store knows of its source."""


@final
@dataclass(frozen=True, eq=False)
class Scaling:
    """``(x - mean) / deviation`` for every column; a constant column becomes 0."""

    mean: FloatArray
    deviation: FloatArray

    @classmethod
    def fitted(cls, batches: Iterable[NDArray[Any]]) -> Self:
        """The scaling that gives all these rows mean 0 and deviation 1, in one pass over them.

        Means and squared distances of batches are merged (Chan et al. 1979), so that columns far
        from 0 lose no digits. Rows that are not finite do not count: who stores them refuses them.

        >>> scaling = Scaling.fitted([np.array([[1.0, 7.0]]), np.array([[3.0, 7.0]])])
        >>> scaling(np.array([[1.0, 7.0], [5.0, 7.0]])).tolist()
        [[-1.0, 0.0], [3.0, 0.0]]
        """
        rows, mean, squares = 0, np.zeros(()), np.zeros(())
        for batch in batches:
            if batch.ndim != 2:
                raise FedShuffleError(
                    f"only columns of numbers can be standardised, but an input has the shape"
                    f" {batch.shape[1:]}. Scale it before the import."
                )
            kept = batch[np.isfinite(batch).all(1)].astype(np.float64)
            if len(kept):
                away = kept.mean(0) - mean
                share = len(kept) / (rows + len(kept))
                squares = squares + kept.var(0) * len(kept) + away**2 * rows * share
                mean, rows = mean + away * share, rows + len(kept)
        deviation = np.sqrt(squares / max(rows, 1))
        varies = deviation > 1e-12 * np.abs(mean)  # what is less is rounding
        return cls(mean, np.where(varies, deviation, 1.0))

    @classmethod
    def of(cls, store: str | Path, columns: str | list[str]) -> Self:
        """The scaling by which the input of a store was standardised; its columns must be these."""
        source = open_store(store).source
        if KEY not in source:
            raise FedShuffleError(
                f"the inputs in {str(store)!r} are not standardised. Import that one with"
                " standardise first."
            )
        theirs = source["columns"]["input"]
        if theirs != columns:
            raise FedShuffleError(
                f"{str(store)!r} has the input columns {theirs}, and this table {columns}. Name the"
                " same ones with input."
            )
        return cls(*(np.array(source[KEY][name]) for name in ("mean", "deviation")))

    def __call__(self, rows: NDArray[Any]) -> FloatArray:
        """Rows on the new scale."""
        scaled: FloatArray = (rows - self.mean) / self.deviation
        return scaled

    def to_dict(self) -> dict[str, list[float]]:
        """Plain data for the store."""
        return {"mean": self.mean.tolist(), "deviation": self.deviation.tolist()}
