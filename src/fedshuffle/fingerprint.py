"""Fingerprints that let a resumed run check its model, data and settings."""

import functools
import hashlib
import platform
import re
from collections.abc import Iterable
from dataclasses import fields
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle.federation import Federation
from fedshuffle.local_optimisers import SGD
from fedshuffle.local_work import EpochRange, LocalWork
from fedshuffle.losses import MeanLoss, predict

ROWS = 1000
"""Largest number of rows of a field that its fingerprint covers."""


def function(value: Any) -> str:
    """The name of a function, or of the class of any other object.

    >>> from fedshuffle import losses
    >>> function(losses.cross_entropy), function(lambda model: 0), function(nn.MSELoss())
    ('MeanLoss(_cross_entropies)', '<lambda>', 'MSELoss')
    """
    if isinstance(value, functools.partial):
        given = [*map(part, value.args), *(f"{k}={part(v)}" for k, v in value.keywords.items())]
        return f"{function(value.func)}({', '.join(given)})"
    if isinstance(value, MeanLoss):
        parts = [value.each, *([] if value.predict is predict else [value.predict])]
        return f"MeanLoss({', '.join(map(function, parts))})"
    name: str = getattr(value, "__qualname__", type(value).__qualname__)
    return "<lambda>" if name.endswith("<lambda>") else name


def part(value: Any) -> str:
    """The ``repr`` of a value, without addresses in memory.

    >>> part(object()), part([object()])
    ('object', '[<object object>]')
    """
    value = value.item() if isinstance(value, np.generic) else value
    return function(value) if callable(value) or _without_repr(value) else _repr(value)


def example_transform(value: Any) -> str | None:
    """The name of a function; the ``repr`` of an object, which may list its settings.

    >>> example_transform(nn.Dropout(0.1)), example_transform(part)
    ('Dropout(p=0.1, inplace=False)', 'part')
    """
    if value is None:
        return None
    named = hasattr(value, "__qualname__") or isinstance(value, functools.partial)
    return function(value) if named or _without_repr(value) else _repr(value)


def work(work: LocalWork) -> str:
    """The ``repr`` of local work, with a digest of epochs per client.

    >>> work(LocalWork(epochs=[1, 2]))[:29]
    'LocalWork(epochs=sha256:0c730'
    """
    given = {field.name: getattr(work, field.name) for field in fields(work)}
    if work.optimiser in (None, SGD):  # runs of earlier versions had no other
        del given["optimiser"]
    shown = {name: part(value) for name, value in given.items()}
    if np.ndim(work.epochs) and not isinstance(work.epochs, EpochRange):  # type: ignore[arg-type]
        numbers = np.asarray(work.epochs).astype("<i8")
        shown["epochs"] = f"sha256:{hashlib.sha256(numbers.tobytes()).hexdigest()}"
    return f"LocalWork({', '.join(f'{name}={value}' for name, value in shown.items())})"


def versions() -> dict[str, str]:
    """The versions that a result depends on besides its settings."""
    return {
        "fedshuffle": version("fedshuffle"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
    }


def data(federation: Federation) -> str:
    """A digest of the shapes of all fields and of some evenly spaced rows of each."""
    digest = hashlib.sha256()
    for field in federation.tensors() if federation.fields else ():
        digest.update(_kind(field))
        rows = torch.linspace(0, len(field) - 1, min(ROWS, len(field)), dtype=torch.float64)
        for row in rows.long().tolist():  # one by one: a field on disk may be large
            digest.update(_bytes(field[row]))
    return digest.hexdigest()


def architecture(model: nn.Module) -> str:
    """A digest of the names, shapes and dtypes of all parameters."""
    return _digest(
        f"{name} {tensor.requires_grad} ".encode() + _kind(tensor)
        for name, tensor in model.named_parameters()
    )


def frozen(model: nn.Module) -> str:
    """A digest of what training does not change: frozen parameters, and buffers."""
    fixed = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    return _digest(
        part
        for name, tensor in [*fixed, *model.named_buffers()]
        for part in (f"{name} ".encode() + _kind(tensor), _bytes(tensor))
    )


def frozen_names(model: nn.Module) -> set[str]:
    """The names of frozen parameters in a state_dict, also where two layers share one."""
    every = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in every if not parameter.requires_grad}


def tensor(values: Tensor) -> str:
    """A digest of a tensor."""
    return _digest([_kind(values), _bytes(values)])


def _without_repr(value: Any) -> bool:
    """Whether the ``repr`` of a value is only its address."""
    plain: Any = object.__repr__
    return type(value).__repr__ is plain


def _repr(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _kind(tensor: Tensor) -> bytes:
    return f"{tensor.dtype} {tuple(tensor.shape)}\n".encode()


def _bytes(tensor: Tensor) -> bytes | memoryview:
    """A tensor's numbers, on its own memory where that is possible."""
    if tensor.is_meta:  # it has no values
        return b""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
