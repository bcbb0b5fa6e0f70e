"""The LoRA adapters of a model, and FFA-LoRA, which freezes the factor A."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from fedshuffle._arrays import expect
from fedshuffle.errors import FedShuffleError


class Adapter(NamedTuple):
    """One adapter of one layer: ``W + scale B A``."""

    name: str
    """The layer's name in the model."""
    layer: Any
    """The layer of peft, with the frozen one in ``base_layer``."""
    a: nn.Parameter
    b: nn.Parameter
    scale: float
    random: nn.Parameter
    """The factor that begins at random; the other begins with zero."""


def adapters(model: nn.Module, purpose: str) -> list[Adapter]:
    """All LoRA adapters of a model; an error for one without, or with another kind of adapter."""
    expect(model, nn.Module, "model")
    found = list(_find(model, purpose))
    if not found:
        raise FedShuffleError(
            f"{purpose} needs a model with LoRA adapters, and {type(model).__name__} has none. Make"
            " one by peft.get_peft_model(model, peft.LoraConfig(...))."
        )
    return found


def _find(model: nn.Module, purpose: str) -> Iterator[Adapter]:
    for name, layer in model.named_modules():
        if not isinstance(getattr(layer, "lora_A", None), nn.ModuleDict):
            continue
        for key in layer.lora_A:
            if (variant := getattr(layer, "lora_variant", {}).get(key)) is not None:
                kind = type(variant).__name__
                raise FedShuffleError(
                    f"layer {name!r} has an adapter of another kind ({kind}), which is not linear"
                    f" in B. {purpose} needs plain LoRA: leave options such as use_dora out."
                )
            a, b = layer.lora_A[key].weight, layer.lora_B[key].weight
            yield Adapter(name, layer, a, b, float(layer.scaling[key]), random=a)
        for key, a in getattr(layer, "lora_embedding_A", {}).items():
            b = layer.lora_embedding_B[key]
            yield Adapter(name, layer, a, b, float(layer.scaling[key]), random=b)


def ffa(model: nn.Module) -> nn.Module:
    r"""Freeze the A of every LoRA adapter (FFA-LoRA), in place; returns the model.

    The update of a layer, :math:`s \, \Delta B A`, is then linear in what is trained. So averaging
    :math:`B` averages the layers themselves, and what the audit says of a method is true of them:

    .. math:: \sum_i a_i \, (B_i A - B A) = \Big(\sum_i a_i (B_i - B)\Big) A.

    It also halves what clients send. In embeddings B is frozen, since there peft begins with an A
    of zero. Sun et al. 2024, *Improving LoRA in Privacy-preserving
    Federated Learning*, arXiv:2403.12313.

    >>> from fedshuffle.finetuning import LoRALinear
    >>> model = ffa(LoRALinear(nn.Linear(3, 2), rank=1))
    >>> [name for name, p in model.named_parameters() if p.requires_grad]
    ['lora_B.default.weight']
    """
    for adapter in adapters(model, "ffa"):
        adapter.random.requires_grad_(False)
    return model
