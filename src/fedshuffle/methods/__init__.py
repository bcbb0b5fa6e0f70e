"""Methods by name.

A name may be followed by options, and by a second method that gives averaging and local work:

>>> get("fedshuffle").summary
'scaled step sizes, reshuffled epochs, w/p'
>>> get("fedprox:mu=0.1+fedshuffle").direction
Proximal(mu=0.1)
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from fedshuffle._arrays import expect, number
from fedshuffle.errors import FedShuffleError, check_known, unknown
from fedshuffle.kernel import FullGradient, StepCoefficients
from fedshuffle.methods import options
from fedshuffle.methods.averaging import (
    Cohort,
    Custom,
    EffectiveSteps,
    FedShuffleGen,
    InclusionProbability,
    Normaliser,
    RatioOfSums,
    SumOne,
    Unnormalised,
    objective_weight,
    own_steps,
    steps_of_the_longest,
    weight_per_share_done,
    weight_per_step,
)
from fedshuffle.methods.directions import (
    MVR,
    CohortMoments,
    Direction,
    GlobalMomentum,
    LocalPlan,
    MethodState,
    OwnModels,
    Plain,
    Reported,
    RoundContext,
    Steps,
)
from fedshuffle.methods.method import Family, Method
from fedshuffle.methods.servers import ServerOptimiser

__all__ = [
    "MVR",
    "Cohort",
    "CohortMoments",
    "Custom",
    "Direction",
    "EffectiveSteps",
    "Family",
    "FedShuffleGen",
    "FullGradient",
    "GlobalMomentum",
    "InclusionProbability",
    "LocalPlan",
    "Method",
    "MethodState",
    "Normaliser",
    "OwnModels",
    "Plain",
    "RatioOfSums",
    "Reported",
    "RoundContext",
    "ServerOptimiser",
    "StepCoefficients",
    "Steps",
    "SumOne",
    "Unnormalised",
    "available",
    "colour",
    "get",
    "label",
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

    Args:
        method: the method; :func:`get` then finds it by its name.
        replace: whether it may replace a method that you registered before, as when a notebook
            cell runs again; the methods of the library keep their names.

    >>> with isolated_registry():  # only for this example
    ...     mine = register(dataclasses.replace(get("fedavg"), name="mine"))
    ...     get("mine") is mine
    True
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
            " spaces, which have a meaning in the text that names methods."
        )
    _REGISTRY[method.name] = method
    return method


@contextmanager
def isolated_registry() -> Iterator[None]:
    """Undo all registrations at the end of the context."""
    before = dict(_REGISTRY)
    try:
        yield
    finally:
        _REGISTRY.clear()
        _REGISTRY.update(before)


def available() -> list[Method]:
    """All registered methods.

    >>> "fedshuffle" in [method.name for method in available()]
    True
    """
    return list(_REGISTRY.values())


def label(method: str | Method) -> str:
    """How text and figures call a method; one that has no label goes by its name.

    >>> label("fedavg-rr")
    'FedAvgRR'
    """
    found = _REGISTRY.get(method) if isinstance(method, str) else method
    return found.style[0] if found else str(method)


def colour(method: str | Method) -> str:
    """The colour of a method in figures; black if it has none.

    >>> colour("a method of your own")
    '#000000'
    """
    found = _REGISTRY.get(method) if isinstance(method, str) else method
    return found.style[1] if found else "#000000"


def get(method: str | Method) -> Method:
    """The method that a text names; a method itself is returned as it is.

    Args:
        method: a name, with options after a colon (``"fedprox:mu=0.1"``), and after a plus the
            method that gives averaging and local work (``"fedprox+fedshuffle"``).

    >>> get("fednova-rr").name
    'fednova-rr'
    """
    if isinstance(method, Method):
        return method
    expect(method, str, "method")
    first, *others = (text.strip() for text in method.split("+"))
    found = _with_options(first)
    for text in others:
        other = _with_options(text)
        given = text.partition(":")[2]
        for name in options.parsed(given) if given else ():
            if name in options.values([other.averaging]):
                continue
            raise FedShuffleError(
                f"option {name} of {text!r} would be dropped, since only its averaging and its"
                " local work are used behind a '+'. Leave the option out."
            )
        found = found.with_averaging(other)
    return found


def _with_options(text: str) -> Method:
    name, colon, given = text.partition(":")
    if name not in _REGISTRY and is_import_path(text):
        raise FedShuffleError(
            f"{text!r} is the import path of a method, which only configs and commands follow. In"
            " Python, import the method and give it itself, or by its name once it is registered."
        )
    check_known("method", name, _REGISTRY)
    if not colon:
        return _REGISTRY[name]
    return dataclasses.replace(_REGISTRY[name].with_options(options.parsed(given)), name=text)


def is_import_path(text: str) -> bool:
    """Whether a text is the import path of a method, ``module:NAME``, not a name with options.

    >>> is_import_path("my.module:METHOD"), is_import_path("fedprox:mu=0.1")
    (True, False)
    """
    return ":" in text and "=" not in text


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
    return kinds[name](number(share, f"the A of momentum {text!r}")) if share else kinds[name]()


_FAMILIES = ["fedavg", "fedau", "fednova", "fedshuffle", "fedprox", "scaffold", "fedlin", "mime"]
_FAMILIES += ["adaptive", "diloco", "mifa", "fedvarp", "fedawe", "amplified", "baselines"]
for _family in _FAMILIES:
    _OWN.update(register(m).name for m in import_module(f"{__name__}.{_family}").METHODS)
