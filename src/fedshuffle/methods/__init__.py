"""Methods by name. Each file of this folder that ends in a table ``METHODS`` is one family.

A name may be followed by options, and by another method whose averaging and local work to use:

>>> get("fedshuffle").summary
'scaled step sizes, reshuffled epochs, w/p'
>>> get("fedprox:mu=0.1+fedshuffle").direction
Proximal(mu=0.1)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from fedshuffle._arrays import expect
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.kernel import Probe, Steering
from fedshuffle.methods import (
    adaptive,
    baselines,
    capped,
    fedavg,
    fedlin,
    fednova,
    fedprox,
    fedshuffle,
    mime,
    options,
    scaffold,
    vrl_sgd,
)
from fedshuffle.methods.averaging import (
    Custom,
    EffectiveSteps,
    FedShuffleGen,
    InclusionProbability,
    Normaliser,
    Participants,
    RatioOfSums,
    SumOne,
    objective_weight,
    own_steps,
    steps_of_the_longest,
    weight_per_share_done,
    weight_per_step,
)
from fedshuffle.methods.directions import (
    Direction,
    Heading,
    Memory,
    Moments,
    Plain,
    RoundStart,
    Steps,
)
from fedshuffle.methods.method import Method
from fedshuffle.methods.momentum import MVR, GlobalMomentum
from fedshuffle.methods.servers import ServerOptimiser

__all__ = [
    "MVR",
    "Custom",
    "Direction",
    "EffectiveSteps",
    "FedShuffleGen",
    "GlobalMomentum",
    "Heading",
    "InclusionProbability",
    "Memory",
    "Method",
    "Moments",
    "Normaliser",
    "Participants",
    "Plain",
    "Probe",
    "RatioOfSums",
    "RoundStart",
    "ServerOptimiser",
    "Steering",
    "Steps",
    "SumOne",
    "available",
    "forgetting",
    "get",
    "is_import_path",
    "objective_weight",
    "own_steps",
    "parse_momentum",
    "register",
    "steps_of_the_longest",
    "weight_per_share_done",
    "weight_per_step",
]

_REGISTRY: dict[str, Method] = {}
_OWN: set[str] = set()
"""The names of the library's own methods."""


def register(method: Method, *, replace: bool = False) -> Method:
    """Make a method known by its name.

    ``replace`` lets it take the place of one that you registered before, as when the cell of a
    notebook runs again; the methods of the library keep their names.
    """
    expect(method, Method, "method")
    if method.name in _REGISTRY and not (replace and method.name not in _OWN):
        remedy = "" if method.name in _OWN else ", or register it with replace=True"
        raise FedShuffleError(
            f"a method named {method.name!r} exists already: choose another name{remedy}."
        )
    if not method.name or set(method.name) & set(":+=, "):
        raise FedShuffleError(
            f"a method cannot be named {method.name!r}: use a name without ':', '+', '=', ',' and"
            " spaces, which mean something where methods are asked for."
        )
    _REGISTRY[method.name] = method
    return method


@contextmanager
def forgetting() -> Iterator[None]:
    """Forget at the end what is registered within."""
    before = dict(_REGISTRY)
    try:
        yield
    finally:
        _REGISTRY.clear()
        _REGISTRY.update(before)


def available() -> list[Method]:
    """All registered methods."""
    return list(_REGISTRY.values())


def get(method: str | Method) -> Method:
    """The method of that name; a method is given back as it is."""
    if isinstance(method, Method):
        return method
    expect(method, str, "method")
    first, *others = method.split("+")
    found = _with_options(first)
    for other in others:
        lent = _with_options(other)
        _check_options_of_averaging(other, lent)
        found = found.with_averaging(lent)
    return found


def _check_options_of_averaging(text: str, method: Method) -> None:
    """Refuse options of the second method in a name that are not those of its averaging."""
    given = text.partition(":")[2]
    known = options.values([method.averaging])
    for name in options.parsed(given) if given else ():
        if name not in known:
            raise FedShuffleError(
                f"option {name} of {text.strip()!r} would be dropped, since only its averaging and"
                " its local work are used behind a '+'. Leave the option out."
            )


def _with_options(text: str) -> Method:
    name, colon, rest = text.strip().partition(":")
    if name not in _REGISTRY and is_import_path(text):
        raise FedShuffleError(
            f"{text.strip()!r} is the import path of a method, which only configs and commands"
            " follow. In Python, import the method and give it itself, or by its name once it is"
            " registered."
        )
    if name not in _REGISTRY:
        raise unknown("method", name, _REGISTRY)
    if not colon:
        return _REGISTRY[name]
    changed = _REGISTRY[name].with_options(options.parsed(rest))
    return dataclasses.replace(changed, name=text.strip())


def is_import_path(method: str) -> bool:
    """Whether a text names a method of the user's own, ``module:NAME``, not one by its options.

    >>> is_import_path("my.module:METHOD"), is_import_path("fedprox:mu=0.1")
    (True, False)
    """
    return ":" in method and "=" not in method


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


for _family in (
    fedavg,
    fednova,
    fedshuffle,
    capped,
    fedprox,
    scaffold,
    vrl_sgd,
    fedlin,
    mime,
    adaptive,
    baselines,
):
    for _method in _family.METHODS:
        _OWN.add(register(_method).name)
