"""A local optimiser for many clients at once: the formulas of torch.optim on tables."""

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import FloatArray
from fedshuffle.engines.gradients import Tables, column
from fedshuffle.errors import FedShuffleError
from fedshuffle.local_optimisers import LocalOptimiser


class RowOptimiser:
    """SGD with momentum, Adam or AdamW for many clients at once, each a row of every table.

    The same numbers as torch's own for each client: see ``torch.optim`` for the formulas.
    """

    def __init__(self, optimiser: LocalOptimiser, like: Tables, step_sizes: FloatArray) -> None:
        if optimiser.kind not in ("sgd", "adam", "adamw"):
            raise FedShuffleError(
                f"the vectorized engine trains with sgd, adam or adamw, not with {optimiser}. Use"
                " the engine 'sequential'."
            )
        self._kind, self._step_sizes = optimiser.kind, step_sizes
        self._taken = np.zeros(len(step_sizes))
        given = optimiser.options
        self._momentum, self._nesterov = given.get("momentum", 0.0), given.get("nesterov", False)
        self._dampening = given.get("dampening", 0.0)
        self._betas = given.get("beta1", 0.9), given.get("beta2", 0.999)
        self._eps, self._amsgrad = given.get("eps", 1e-8), given.get("amsgrad", False)
        decay = given.get("weight_decay", 0.01)  # torch's default
        self._decay = decay if self._kind == "adamw" else 0.0
        moments = 1 if self._kind == "sgd" else 2 + self._amsgrad
        self._state = [[torch.zeros_like(table) for table in like] for _ in range(moments)]

    def step(self, rows: slice | list[int], here: Tables, gradients: Tables) -> None:
        """One step of the clients in these rows, in place."""
        self._taken[rows] += 1
        taken, sizes = self._taken[rows], self._step_sizes[rows]
        each: tuple[FloatArray, ...]  # numbers per client, in double precision as in torch
        if self._kind == "sgd":
            each = sizes, 1 - self._dampening * (taken > 1)
        else:
            first, second = (1 - beta**taken for beta in self._betas)
            each = sizes / first, 1 / np.sqrt(second), 1 - sizes * self._decay
        step = self._sgd if self._kind == "sgd" else self._adam
        columns = [here[0].new_tensor(values) for values in each]
        for k, (table, gradient) in enumerate(zip(here, gradients, strict=True)):
            kept = [moment[k][rows] for moment in self._state]  # views, unless rows are scattered
            step(table, gradient, kept, *(column(values, table) for values in columns))
            if not isinstance(rows, slice):
                for moment, part in zip(self._state, kept, strict=True):
                    moment[k][rows] = part

    def _sgd(self, y: Tensor, g: Tensor, kept: Tables, size: Tensor, share: Tensor) -> None:
        (buffer,) = kept
        buffer.mul_(self._momentum).addcmul_(g, share)
        y.sub_(size * (g.add(buffer, alpha=self._momentum) if self._nesterov else buffer))

    def _adam(
        self, y: Tensor, g: Tensor, kept: Tables, size: Tensor, corrected: Tensor, keep: Tensor
    ) -> None:
        (mean, square, *largest), (b1, b2) = kept, self._betas
        y.mul_(keep)
        mean.lerp_(g, 1 - b1)
        square.mul_(b2).addcmul_(g, g, value=1 - b2)
        if largest:
            square = torch.maximum(largest[0], square, out=largest[0])
        y.sub_(size * mean / square.sqrt().mul_(corrected).add_(self._eps))
