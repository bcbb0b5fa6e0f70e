"""Methods by name. Each file of this folder that ends in a table ``METHODS`` is one family.

>>> get("fedshuffle").summary
'scaled step sizes, reshuffled epochs, w/p'
"""

from __future__ import annotations

from fedshuffle._arrays import expect
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.methods import fedavg, fednova, fedshuffle
from fedshuffle.methods.averaging import (
    Custom,
    EffectiveSteps,
    FedShuffleGen,
    InclusionProbability,
    Normaliser,
    Participants,
    SumOne,
)
from fedshuffle.methods.directions import MVR, Direction, GlobalMomentum, Plain
from fedshuffle.methods.method import Method

__all__ = [
    "MVR",
    "Custom",
    "Direction",
    "EffectiveSteps",
    "FedShuffleGen",
    "GlobalMomentum",
    "InclusionProbability",
    "Method",
    "Normaliser",
    "Participants",
    "Plain",
    "SumOne",
    "available",
    "get",
    "parse_momentum",
    "register",
]

_REGISTRY: dict[str, Method] = {}


def register(method: Method) -> Method:
    """Make a method known by its name, to Python and to the command line."""
    if method.name in _REGISTRY:
        raise FedShuffleError(
            f"a method named {method.name!r} exists already: choose another name."
        )
    _REGISTRY[method.name] = method
    return method


def available() -> list[Method]:
    """All registered methods."""
    return list(_REGISTRY.values())


def get(method: str | Method) -> Method:
    """The method of that name; a method is given back as it is."""
    if isinstance(method, Method):
        return method
    expect(method, str, "method")
    if method not in _REGISTRY:
        raise unknown("method", method, _REGISTRY)
    return _REGISTRY[method]


def parse_momentum(text: str) -> Direction:
    """A momentum from text: ``none``, ``mvr:A`` (exact) or ``global:A`` (cheap).

    >>> parse_momentum("mvr:0.1")
    MVR(a=0.1)
    """
    name, _, share = text.strip().partition(":")
    kinds = {"mvr": MVR, "global": GlobalMomentum}
    if text.strip() == "none":
        return Plain()
    if name not in kinds:
        raise unknown("momentum", text, ["none", *(f"{kind}:A" for kind in kinds)])
    try:
        return kinds[name](float(share)) if share else kinds[name]()
    except FedShuffleError:
        raise
    except ValueError as error:
        raise FedShuffleError(f"momentum {text!r} cannot be read: write '{name}:0.1'.") from error


for _family in (fedavg, fednova, fedshuffle):
    for _method in _family.METHODS:
        register(_method)
