"""Gradients of many clients' models at once, through vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedshuffle.engines.base import gradients
from fedshuffle.engines.problem import Loss, Problem
from fedshuffle.errors import FedShuffleError

Tables = list[Tensor]
"""The parameters of many models: one table per parameter, one row per model."""

Batch = tuple[Tensor, ...]
Descend = Callable[[Tables, Batch, Tensor, Tables, Tensor | None], None]
"""``descend(at, batch, shares, into, keep)``: for every client i (a row everywhere)
``into_i <- keep_i into_i + sum_j shares_ij grad f_ij(at_i)`` over the examples j of its minibatch.
"""


def column(values: Tensor, like: Tensor) -> Tensor:
    """One number per row, to be multiplied with a table."""
    return values.view(-1, *[1] * (like.ndim - 1))


class _Objective(nn.Module):
    """Model and loss as one module, so that functional_call can swap the parameters."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss(self.model, *batch)


def by_vmap(problem: Problem) -> Descend:
    """Differentiates any model that vmap can run; refuses one whose options vmap ignores."""
    _refuse_ignored_options(problem)
    # On a copy, since functional_call swaps the parameters of the module itself.
    objective = _Objective(problem.replica(), problem.loss)
    names = [f"model.{name}" for name in problem.parameters]

    def loss(model: Tables, batch: Batch) -> Any:
        return functional_call(objective, dict(zip(names, model, strict=True)), batch)

    losses: Callable[..., Tensor] = vmap(loss)

    def descend(
        at: Tables, batch: Batch, shares: Tensor, into: Tables, keep: Tensor | None
    ) -> None:
        leaves = [table.detach().requires_grad_() for table in at]
        try:
            each = losses(leaves, batch)
        except Exception as error:
            raise FedShuffleError(
                f"this model or loss cannot be vectorized ({type(error).__name__}: {error})."
                " Use the engine 'reference' to see at which client, or if it can be trained."
            ) from error
        # Clients are independent, so one backward pass serves them all.
        found = gradients(each.sum(dim=0), leaves)
        by = shares.sum(dim=1)
        for table, gradient in zip(into, found, strict=True):
            if keep is not None:
                table.mul_(column(keep, table))
            table.addcmul_(gradient, column(by, table))

    return descend


def _refuse_ignored_options(problem: Problem) -> None:
    """Options of embeddings whose effect the comparison with the reference might not show."""
    found = ["max_norm"] if problem.changes_parameters else []
    for module in problem.model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            found += ["padding_idx"] * (module.padding_idx is not None)
            found += ["scale_grad_by_freq"] * module.scale_grad_by_freq
    if found:
        raise FedShuffleError(
            f"an embedding has {found[0]}, which has no effect in the vectorized engine. Use the"
            " engine 'sequential'."
        )
