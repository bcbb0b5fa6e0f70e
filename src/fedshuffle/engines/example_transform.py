"""The transform of a federation, applied to one minibatch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.randomness import Address, Purpose, seeded_generators


def transformed(
    transform: Callable[..., Any], fields: Sequence[Tensor], address: Address
) -> tuple[Tensor, ...]:
    """What the transform makes of the fields of a minibatch, with the randomness of an address.

    The global generators of Python, numpy and torch are seeded by the address and restored, so
    that a transform may draw from any of them.

    >>> from functools import partial
    >>> noisy = partial(transformed, lambda x: x + torch.rand(len(x)), [torch.zeros(2)])
    >>> torch.equal(noisy(Address(1, round=3))[0], noisy(Address(1, round=3))[0])
    True
    >>> torch.equal(noisy(Address(1, round=3))[0], noisy(Address(1, round=4))[0])
    False
    """
    rows = len(fields[0])
    seeded = seeded_generators(address.generator(Purpose.EXAMPLES), fields[0].device)
    with torch.no_grad(), seeded, error_context("the transform of the examples"):
        made = transform(*fields)
    if isinstance(made, Tensor) and len(fields) == 1:
        made = (made,)
    if not isinstance(made, tuple | list) or not all(isinstance(one, Tensor) for one in made):
        what = type(made).__name__
        if isinstance(made, tuple | list):
            what += f" of {', '.join(type(one).__name__ for one in made)}"
        raise FedShuffleError(
            f"the transform of the examples takes {len(fields)} fields and returned a {what}."
            " Return all fields that the loss takes, as a tuple of tensors."
        )
    for k, field in enumerate(made):
        if not field.ndim or len(field) != rows:
            raise FedShuffleError(
                f"the transform of the examples returned field {k} of shape"
                f" {tuple(field.shape)} for {rows} examples. Return one row per example."
            )
        if field.is_floating_point() and not field.isfinite().all():
            raise FedShuffleError(
                f"the transform of the examples returned NaN or infinity in field {k}."
            )
    if not made:
        raise FedShuffleError("the transform of the examples returned no field.")
    return tuple(made)
