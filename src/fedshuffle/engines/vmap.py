"""Gradients of many clients' models at once, through vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode

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
        self.model = model
        self.loss = loss

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
    options = ["max_norm"] if problem.changes_parameters else []
    if not options:
        with _Embeddings() as embeddings:
            problem.loss(problem.replica(), *problem.few())
        options = embeddings.options
    if options:
        raise FedShuffleError(
            f"an embedding has {options[0]}, which has no effect in the vectorized engine. Use the"
            " engine 'sequential'."
        )


class _Embeddings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the options of embeddings that a layer or a function looks up."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.options: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        packet, aten = func.overloadpacket, torch.ops.aten
        if packet in (aten.embedding, aten._embedding_bag):
            named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
            given = {**dict(named), **(kwargs or {})}
            if packet is aten.embedding and given.get("padding_idx", -1) >= 0:
                self.options.append("padding_idx")
            if given.get("scale_grad_by_freq"):
                self.options.append("scale_grad_by_freq")
        return func(*args, **(kwargs or {}))
