"""Copies of a model that share its frozen parameters, so that a large base is held only once."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedshuffle.errors import FedShuffleError

_PLACES = 64  # numbers of a frozen parameter that are compared to notice a change


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy with trainable parameters and buffers of its own, and frozen parameters on the memory
    of the model's. Nothing may write to these.

    >>> base = nn.Linear(2, 2).requires_grad_(False)
    >>> model = nn.Sequential(base, nn.Linear(2, 1))
    >>> same = [p.data_ptr() == q.data_ptr() for p, q in zip(model.parameters(),
    ...         shared_copy(model).parameters())]
    >>> same
    [True, True, False, False]
    """
    shared = {id(p): nn.Parameter(p.detach(), False) for p in shareable(model).values()}
    return copy.deepcopy(model, shared)


def shareable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The frozen parameters that running the model does not change, by name."""
    # An embedding with max_norm rescales its rows when it is used, also where it is frozen.
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    rescaled = {id(m.weight) for m in embeddings if m.max_norm is not None}
    return {
        name: p
        for name, p in model.named_parameters()
        if type(p) is nn.Parameter and not p.requires_grad and id(p) not in rescaled
    }


def samples(model: nn.Module) -> dict[str, Tensor]:
    """A few numbers of every parameter that copies share, for :func:`check_unwritten`."""
    found = {}
    for name, parameter in shareable(model).items():
        flat = parameter.detach().reshape(-1)
        places = torch.linspace(0, max(0, len(flat) - 1), min(_PLACES, len(flat)))
        found[name] = flat[places.long().to(flat.device)]
    return found


def check_unwritten(model: nn.Module, before: Mapping[str, Tensor], who: str) -> None:
    """Refuse code of the user that wrote to parameters that copies share.

    >>> model = nn.Linear(2, 1).requires_grad_(False)
    >>> before = samples(model)
    >>> model.weight += 1
    >>> check_unwritten(model, before, "evaluate")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedshuffle.errors.FedShuffleError: evaluate changed the frozen parameter 'weight', ...
    """
    for name, values in samples(model).items():
        if name in before and not torch.equal(values, before[name]):
            raise FedShuffleError(
                f"{who} changed the frozen parameter {name!r}, which all copies of the model share"
                " with the one that was given. Let it work on copy.deepcopy(model), as before"
                " merging adapters into their base."
            )
