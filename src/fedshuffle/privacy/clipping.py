r"""Clipping: the largest norm of what a client sends.

.. math:: m_i = u_i \min(1, C / |u_i|), \qquad \text{or, weighted,} \qquad
          m_i = u_i \min(1, C / |a_i u_i|).

The sum :math:`\sum_{i \in S} a_i m_i` then changes by at most :math:`a_i C`, or :math:`C`, when
client i is added or removed.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedshuffle._arrays import FloatArray, number
from fedshuffle.transforms import ClientContext, Message, Transform

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Clip(Transform):
    """Scale updates down to a largest norm, of the update or of the update times its weight.

    >>> import numpy as np, torch
    >>> one = np.ones(2)
    >>> context = ClientContext(0, 0, np.arange(2), one.astype(int), one, weights=np.array([1, 2.]))
    >>> updates = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> message = Clip(1.0).client(updates, None, context)
    >>> message.values.norm(dim=1).tolist(), message.metrics["clipped"].tolist()
    ([1.0, 0.5], [1.0, 0.0])
    """

    threshold: float
    weighted: bool = False
    any_layout = True
    mean = "model-dependent"

    def __post_init__(self) -> None:
        number(self.threshold, "the threshold of Clip", within="(0, inf)")

    def client(self, updates: "Tensor", state: "Tensor | None", context: ClientContext) -> Message:
        weights = context.weights if self.weighted else None
        return clipped(updates, self.threshold, weights, context.norms)


def clipped(
    updates: "Tensor",
    threshold: float,
    weights: FloatArray | None = None,
    norms: "Tensor | None" = None,
) -> Message:
    """Updates with a largest norm; times the weights, if they are given."""
    import torch

    if norms is None:  # in double precision, where the order of the coordinates hardly matters
        wide = None if updates.device.type == "mps" else torch.float64  # MPS has no doubles
        norms = torch.linalg.vector_norm(updates, dim=1, dtype=wide)
    found = norms.cpu().double().numpy()
    lengths = found if weights is None else found * weights
    # A norm of zero has the factor one. NaN stays NaN: engines refuse it.
    factors = threshold / np.maximum(lengths, threshold)
    return Message(updates, None, {"clipped": (lengths > threshold).astype(np.float64)}, factors)
