"""By what a run knows its own parts again when it goes on: short, plain, and without addresses."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle.federation import Federation
from fedshuffle.local_work import EpochRange, LocalWork
from fedshuffle.losses import MeanLoss

ROWS = 1000
"""The most rows of a field that are looked at."""


def function(value: Any) -> str:
    """A function by its name, any other object by that of its class.

    >>> from fedshuffle import losses
    >>> function(losses.cross_entropy), function(lambda model: 0), function(nn.MSELoss())
    ('MeanLoss(_cross_entropies)', '<lambda>', 'MSELoss')
    """
    if isinstance(value, functools.partial):
        given = [*map(part, value.args), *(f"{k}={part(v)}" for k, v in value.keywords.items())]
        return f"{function(value.func)}({', '.join(given)})"
    if isinstance(value, MeanLoss):
        return f"MeanLoss({function(value.each)})"
    name: str = getattr(value, "__qualname__", type(value).__qualname__)
    return "<lambda>" if name.endswith("<lambda>") else name


def part(value: Any) -> str:
    """What the value says of itself, but not where it or its parts lie in memory.

    >>> part(object()), part([object()])
    ('object', '[<object object>]')
    """
    if isinstance(value, np.generic):
        value = value.item()
    plain: Any = object.__repr__
    own = type(value).__repr__ is not plain
    if callable(value) or not own:
        return function(value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def work(work: LocalWork) -> str:
    """Local work, where a number of epochs per client is a digest.

    >>> work(LocalWork(epochs=[1, 2]))[:29]
    'LocalWork(epochs=sha256:0c730'
    """
    given = {field.name: getattr(work, field.name) for field in fields(work)}
    shown = {name: part(value) for name, value in given.items()}
    if np.ndim(work.epochs) and not isinstance(work.epochs, EpochRange):  # type: ignore[arg-type]
        numbers = np.asarray(work.epochs).astype("<i8")
        shown["epochs"] = f"sha256:{hashlib.sha256(numbers.tobytes()).hexdigest()}"
    return f"LocalWork({', '.join(f'{name}={value}' for name, value in shown.items())})"


def data(federation: Federation) -> str:
    """A digest of the shapes of all fields and of some rows, evenly spaced, of each of them; of
    nothing where only the sizes are known.
    """
    digest = hashlib.sha256()
    for field in federation.tensors() if federation.fields else ():
        digest.update(_kind(field))
        rows = torch.linspace(0, len(field) - 1, min(ROWS, len(field)), dtype=torch.float64)
        for row in rows.long().tolist():  # one by one: what lies on disk may be large
            digest.update(_bytes(field[row]))
    return digest.hexdigest()


def architecture(model: nn.Module) -> str:
    """A digest of the names, the shapes and the kinds of all parameters."""
    digest = hashlib.sha256()
    for name, tensor in model.named_parameters():
        digest.update(f"{name} {tensor.requires_grad} ".encode() + _kind(tensor))
    return digest.hexdigest()


def frozen(model: nn.Module) -> str:
    """A digest of what training does not change: frozen parameters, and buffers."""
    fixed = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    return _digest([*fixed, *model.named_buffers()])


def tensor(values: Tensor) -> str:
    """A digest of a tensor."""
    return hashlib.sha256(_kind(values) + _bytes(values)).hexdigest()


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} ".encode() + _kind(tensor))
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _kind(tensor: Tensor) -> bytes:
    return f"{tensor.dtype} {tuple(tensor.shape)}\n".encode()


def _bytes(tensor: Tensor) -> bytes:
    if tensor.is_meta:  # it has no values
        return b""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
