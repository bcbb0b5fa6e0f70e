r"""FedEx-LoRA and FLoRA: LoRA whose layers are averaged exactly.

Averaging :math:`A_i` and :math:`B_i` separately gives a layer :math:`s \bar B \bar A`, where the
clients' layers average to :math:`s \sum_i a_i B_i A_i`. With the updates :math:`\Delta A_i = A_i -
A` and :math:`\Delta B_i = B_i - B`, and their weighted sums :math:`\Delta A` and :math:`\Delta B`,
the linear terms cancel, whatever the weights :math:`a_i`:

.. math:: R = s \sum_i a_i (B_i A_i - B A) - s \big((B + \Delta B)(A + \Delta A) - B A\big)
            = s \Big(\sum_i a_i \, \Delta B_i \, \Delta A_i - \Delta B \, \Delta A\Big).

The server adds the residual R to the frozen weight. So what a client adds to the sum is a function
of its update alone, and what the server takes off one of the aggregated update.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedshuffle.errors import FedShuffleError
from fedshuffle.finetuning.adapters import Adapter, adapters
from fedshuffle.local_work import Workload
from fedshuffle.transforms import ClientContext, Message, ServerContext, Transform

_ROUNDING = 256  # a proximal term changes base weights by rounding, by up to this many units

Span = tuple[int, int]
"""The first position of a parameter in a flat vector, and the one after its last."""


class Pair(NamedTuple):
    """Where A (rank x inputs), B (outputs x rank) and the base weight are in a flat vector."""

    a: Span
    b: Span
    base: Span
    rank: int
    scale: float
    transposed: bool
    """Whether the base weight is (inputs x outputs), as in GPT-2."""
    largest: float
    """The largest absolute value in the base weight."""

    def product(self, vectors: Tensor) -> Tensor:
        """``scale B A`` of a vector or of rows of them, in the layout of the base weight."""
        lead = vectors.shape[:-1]
        a = vectors[..., slice(*self.a)].reshape(*lead, self.rank, -1)
        b = vectors[..., slice(*self.b)].reshape(*lead, -1, self.rank)
        product = self.scale * (b @ a)
        return (product.mT if self.transposed else product).reshape(*lead, -1)


@dataclass(frozen=True)
class FedEx(Transform):
    """Averages the products of LoRA adapters exactly; :func:`fedex` makes it for a model.

    It is exact where the server adds the aggregated update to the model that all clients started
    from, with any step size. So a server optimiser is refused, which would rescale the residual, an
    asynchronous schedule, and a method that counts old updates. The records hold
    ``residual_share``, the norm of the residual relative to that of the change of the layers: how
    far plain averaging would be off.

    >>> from fedshuffle.finetuning import LoRALinear
    >>> fedex(LoRALinear(nn.Linear(3, 2), rank=1))
    FedEx(adapters=1, size=11, restart=False)
    """

    adapters: int
    size: int
    """Number of parameters, those of the base weights included."""
    restart: bool = False
    """Whether the server merges the adapters into the base and starts new ones (FLoRA)."""
    pairs: tuple[Pair, ...] = field(default=(), repr=False)
    mean = "unchanged"
    needs_average = True

    def check(self, workload: Workload) -> None:
        if workload.work.weight_decay or workload.optimiser.weight_decay:
            raise FedShuffleError(
                "FedEx needs local work without weight decay, which would change the base weights"
                " at every client. Write LocalWork(weight_decay=0) and, since that of 'adamw' is"
                " 0.01 by default, optimiser='adamw:weight_decay=0'."
            )

    @property
    def numbers_sent(self) -> int:  # type: ignore[override]
        return self.size - sum(stop - start for start, stop in {pair.base for pair in self.pairs})

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        if updates.shape[1] != self.size:
            raise FedShuffleError(
                f"FedEx was made for a model with {self.size} parameters, and this one has"
                f" {updates.shape[1]}. Give train the model that fedex(model) was called with."
            )
        bases = {pair.base: pair.largest for pair in self.pairs}
        rounding = _ROUNDING * torch.finfo(updates.dtype).eps
        for base, largest in bases.items():
            change = updates[:, slice(*base)]
            if torch.linalg.vector_norm(change, math.inf) > rounding * largest:
                raise FedShuffleError(
                    "clients changed the base weights, which only the server corrects: as by a"
                    " momentum of the method, or a weight decay of the optimiser. Leave it out."
                )
            change.zero_()
        for pair in self.pairs:
            updates[:, slice(*pair.base)] += pair.product(updates)
        # A client sends its adapters: the server can multiply them itself.
        sent = np.full(len(updates), float(self.numbers_sent * updates.element_size()))
        return Message(updates, metrics={"bytes_up": sent})

    def server(self, update: Tensor, context: ServerContext) -> tuple[Tensor, Mapping[str, Tensor]]:
        update, step = update.clone(), context.step_size
        for pair in self.pairs:
            update[slice(*pair.base)] -= step * pair.product(update)
        if context.model is not None:
            after = context.model + step * update
            context.observed["residual_share"] = self._share(context.model, after)
            if self.restart:
                self._restart(context, after)
                update = (after - context.model) / step
        return update, context.state

    def _share(self, model: Tensor, after: Tensor) -> float:
        """The norm of the residual, relative to that of the change of ``W + scale B A``."""
        residual, change = list[float](), list[float]()
        for base in {pair.base for pair in self.pairs}:
            own = total = after[slice(*base)] - model[slice(*base)]
            for pair in self.pairs:
                if pair.base == base:
                    total = total + pair.product(after) - pair.product(model)
            residual.append(float(own.norm()))
            change.append(float(total.norm()))
        return math.hypot(*residual) / whole if (whole := math.hypot(*change)) else 0.0

    def _restart(self, context: ServerContext, after: Tensor) -> None:
        """Merge the adapters into the base weights; then A is drawn again, and B is zero."""
        draw = context.generator()
        for pair in self.pairs:
            after[slice(*pair.base)] += pair.product(after)
            a, b = after[slice(*pair.a)], after[slice(*pair.b)]
            bound = math.sqrt(pair.rank / len(a))  # as peft begins
            a.copy_(torch.from_numpy(draw.uniform(-bound, bound, len(a))))
            b.zero_()


def fedex(model: nn.Module) -> FedEx:
    """Prepare a model with LoRA adapters for FedEx-LoRA, in place; returns the transform for it.

    Use both: ``train(model, ..., transforms=[fedex(model)])``. The base weights under adapters join
    the model's parameters. Clients do not train them; the server corrects them in every round, so
    that the layers are the average of the clients' layers. The price: checkpoints, and what clients
    receive, hold those weights; messages do not.

    Singhal et al. 2024, *FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of
    Foundation Models*, arXiv:2410.09432.

    >>> from fedshuffle import Federation, losses, train
    >>> from fedshuffle.finetuning import LoRALinear
    >>> clients = Federation.from_arrays(torch.randn(9, 3), torch.randn(9, 2), sizes=[2, 3, 4])
    >>> model = LoRALinear(nn.Linear(3, 2), rank=1)
    >>> exact = fedex(model)
    >>> result = train(
    ...     model, clients, loss=losses.squared_error, rounds=2, transforms=[exact]
    ... )
    >>> result.history[-1]["residual_share"] > 0
    True
    """
    return _prepared(model, restart=False)


def flora(model: nn.Module) -> FedEx:
    """The same for FLoRA: after every round the server merges the adapters into the base weights,
    and clients start with new ones, A drawn at random and B zero.

    Wang et al. 2024, *FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous
    Low-Rank Adaptations*, arXiv:2409.05976; here all clients have adapters of the same rank.

    >>> from fedshuffle.finetuning import LoRALinear
    >>> flora(LoRALinear(nn.Linear(3, 2), rank=1)).restart
    True
    """
    return _prepared(model, restart=True)


def check_prepared(model: nn.Module, transforms: Sequence[Transform]) -> None:
    """Refuse to average a prepared model without the transform that it was prepared for."""
    prepared = any(isinstance(module, FixedWeight) for module in model.modules())
    if prepared and not any(isinstance(one, FedEx) for one in transforms):
        raise FedShuffleError(
            "the model was prepared by fedex or flora, and the run has no such transform, so its"
            " layers would not be averaged exactly. Give transforms=[fedex(model)], or the model as"
            " it was before."
        )


def _prepared(model: nn.Module, restart: bool) -> FedEx:
    purpose = "flora" if restart else "fedex"
    trained = [
        one
        for one in adapters(model, purpose)
        if one.b.requires_grad and (one.a.requires_grad or restart)
    ]
    if not trained:
        raise FedShuffleError(
            "no adapter trains both A and B, so averaging is exact as it is: leave fedex out; or"
            " load adapters to train by PeftModel.from_pretrained(..., is_trainable=True)."
        )
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for adapter in trained:
        _check(adapter, purpose, shared=names[id(_weight(adapter))] > 1)
    for adapter in trained:
        _weight(adapter).requires_grad_(True)
        if not isinstance(adapter.layer.base_layer, FixedWeight):
            adapter.layer.base_layer = FixedWeight(adapter.layer.base_layer)
    spans, end = dict[int, Span](), 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            spans[id(parameter)] = end, end + parameter.numel()
            end += parameter.numel()
    pairs = [
        Pair(
            spans[id(one.a)],
            spans[id(one.b)],
            spans[id(_weight(one))],
            len(one.a),
            one.scale,
            bool(getattr(one.layer, "fan_in_fan_out", False)),
            float(_weight(one).detach().abs().max()),
        )
        for one in trained
    ]
    return FedEx(len(pairs), end, restart, tuple(pairs))


def _weight(adapter: Adapter) -> Any:
    """The base weight under an adapter; None if the layer does not multiply by one."""
    layer = adapter.layer.base_layer
    layer = layer.base_layer if isinstance(layer, FixedWeight) else layer
    return None if isinstance(layer, nn.Embedding) else getattr(layer, "weight", None)


def _check(adapter: Adapter, purpose: str, shared: bool) -> None:
    """Refuse a layer whose base weight cannot be corrected."""
    weight, fault = _weight(adapter), ""
    a, b = tuple(adapter.a.shape), tuple(adapter.b.shape)
    flipped = getattr(adapter.layer, "fan_in_fan_out", False)
    shape = None if weight is None or hasattr(adapter.layer, "parameter_name") else weight.shape
    if len(a) != 2 or shape != ((a[1], b[0]) if flipped else (b[0], a[1])):
        fault = "is no linear layer: leave it out of target_modules"
    elif shared:
        fault = "shares its weight with another layer: leave it out of target_modules"
    elif weight.dtype != adapter.a.dtype or weight.element_size() < 4:
        fault = (
            f"has a base of {weight.dtype} and adapters of {adapter.a.dtype}. Corrections are small"
            " and need both in single precision: call model.float() first"
        )
    elif not adapter.a.requires_grad:
        fault = "has a frozen A, and flora draws a new one in every round: train it as well"
    if fault:
        raise FedShuffleError(f"{purpose}: layer {adapter.name!r} {fault}.")


class FixedWeight(nn.Module):
    """A layer whose weight is a parameter of the model, but gets no gradient."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer  # by peft's name, so that it finds the layer to merge into

    def forward(self, *inputs: Any, **options: Any) -> Any:
        fixed = {"weight": self.base_layer.weight.detach()}
        return functional_call(self.base_layer, fixed, inputs, options)
