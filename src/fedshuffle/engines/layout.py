"""Where the parameters lie in a flat vector, in the order that is quickest to compute with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor


@final
class Layout:
    """A flat vector of the same numbers as a model's, each parameter's axes in an order of its own.

    Methods know only plain vectors. An engine arranges what it is given, works, and restores what
    it answers.

        >>> layout = Layout([torch.Size([2, 3]), torch.Size([2])], [(1, 0), (0,)])
        >>> x = torch.arange(8.0)
        >>> layout.arrange(x)
        tensor([0., 3., 1., 4., 2., 5., 6., 7.])
        >>> bool((layout.restore(layout.arrange(x)) == x).all())
        True
    """

    def __init__(self, shapes: Sequence[torch.Size], orders: Sequence[tuple[int, ...]]) -> None:
        self._shapes = list(shapes)
        self._orders = list(orders)
        self._lengths = [shape.numel() for shape in shapes]
        self._plain = all(order == tuple(range(len(order))) for order in orders)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters in their own shape, as views of an arranged vector (or rows of them)."""
        lead = flat.shape[:-1]
        found = []
        parts = torch.split(flat, self._lengths, dim=-1)
        for part, shape, order in zip(parts, self._shapes, self._orders, strict=True):
            stored = part.view([*lead, *(shape[axis] for axis in order)])
            back = [len(lead) + order.index(axis) for axis in range(len(order))]
            found.append(stored.permute([*range(len(lead)), *back]))
        return found

    def arrange(self, plain: Tensor) -> Tensor:
        """Plain vectors (one, or rows) in this layout."""
        if self._plain:
            return plain
        arranged = torch.empty_like(plain)
        parts = torch.split(plain, self._lengths, dim=-1)
        for view, part in zip(self.views(arranged), parts, strict=True):
            view.copy_(part.view(view.shape))
        return arranged

    def restore(self, arranged: Tensor) -> Tensor:
        """Arranged vectors (one, or rows) as plain ones."""
        if self._plain:
            return arranged
        lead = arranged.shape[:-1]
        return torch.cat([view.reshape(*lead, -1) for view in self.views(arranged)], dim=-1)
