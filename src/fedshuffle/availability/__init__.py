"""Availability: who is there in a round, before the sampling asks anybody.

An availability is an object (:class:`Markov`, :class:`Cyclic`, ...) or the text that names one,
which :func:`parse` reads. Where a number per client is wanted, one number stands for all.

===================================  =========================================================
``independent:0.9,0.5,0.2``          each client is there with its probability in every round
``markov:on=0.1,off=0.2``            a client that is away comes with probability ``on`` per
                                     round, and goes with ``off``; also lists, ``on=0.1,0.3``
``cyclic:24:0.5``                    day and night: there for half of every 24 rounds, by a
                                     time zone that is drawn; ``cyclic:24:0.5:0,6,12`` gives them
``groups:0,0,1:KIND``                clients of a group come and go together; ``groups:2:KIND``
                                     makes two groups of neighbours
``drifting:0.9,0.1:0.1,0.9``         from the first probabilities to the last over the rounds of
                                     the run, or ``:ROUNDS``
``trace:FILE``                       as recorded (see :mod:`fedshuffle.availability.trace`);
                                     ``+gaps`` allows rounds with nobody
===================================  =========================================================

After each, ``+leaves:0.1`` lets asked clients leave before they answer, and ``+drop`` trains
without clients that are never there, which are an error otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, count, expect, number
from fedshuffle.availability.base import Availability, per_client
from fedshuffle.availability.cyclic import Cyclic, Drifting
from fedshuffle.availability.device_traces import convert_device_trace
from fedshuffle.availability.independent import Always, Groups, Independent, Leaving
from fedshuffle.availability.markov import Markov
from fedshuffle.availability.trace import Trace
from fedshuffle.errors import FedShuffleError, check_known, error_context
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, generator

__all__ = [
    "Always",
    "Availability",
    "Cyclic",
    "Drifting",
    "Groups",
    "Independent",
    "Leaving",
    "Markov",
    "Trace",
    "convert_device_trace",
    "parse",
    "resolve",
]


@dataclass(frozen=True)
class _Population:
    """What the meaning of a text depends on: the clients, the rounds, and where files are."""

    clients: int
    rounds: int | None = None
    folder: Path = field(default_factory=Path)
    ids: tuple[object, ...] | None = None
    gaps: bool = False


def parse(
    text: str, federation: Federation, rounds: int | None = None, folder: Path | None = None
) -> Availability:
    """The availability that a text names, for this federation.

    ``rounds`` are those of the run, for a drift; files are found from ``folder``.

        >>> parse("markov:on=0.1,off=0.1,0.3", Federation.from_sizes([1, 2]))
        markov, 0.375 of the time
    """
    with error_context(f"availability {text!r:.60}", FedShuffleError):
        name, argument, options = _read(text)
        ids = tuple(federation.ids) if "trace" in text else None
        of = _Population(len(federation), rounds, folder or Path(), ids, "gaps" in options)
        found = _make(name, argument, of)
        if "leaves" in options:
            found = Leaving(found, _each(options["leaves"], of, "leaves"))
        found.drop = "drop" in options
        return found


def check(text: str) -> None:
    """Refuse a text that names no availability, before there is a federation."""
    with error_context(f"availability {text!r:.60}", FedShuffleError):
        _read(text)


def pinned(text: str, rounds: int) -> str:
    """The text of an availability that does not change when more rounds are asked for.

    >>> pinned("drifting:0.9:0.1+drop", 100), pinned("independent:0.9", 100)
    ('drifting:0.9:0.1:100+drop', 'independent:0.9')
    """
    main, plus, options = text.strip().partition("+")
    if "drifting:" in main and main.split("drifting:")[1].count(":") == 1:
        main += f":{rounds}"
    return main + plus + options


def resolve(
    availability: "str | Availability",
    federation: Federation,
    rounds: int | None = None,
    folder: Path | None = None,
) -> Availability:
    """An availability, given as text or as it is, that fits the federation.

    >>> resolve(Independent([0.5, 0.2]), Federation.from_sizes([1, 2]))
    independent, 0.35 of the time
    """
    if isinstance(availability, str):
        return parse(availability, federation, rounds, folder)
    expect(availability, Availability, "availability")
    if len(availability) != len(federation):
        raise FedShuffleError(
            f"the availability is for {len(availability)} clients, but the federation has"
            f" {len(federation)}."
        )
    return availability


_OPTIONS = {"leaves": True, "drop": False, "gaps": False}  # whether a value follows


def _read(text: str) -> tuple[str, str, dict[str, str]]:
    """The kind that a text names, its argument, and the options after it."""
    main, *rest = text.strip().split("+")
    name, _, argument = main.partition(":")
    check_known("availability", name, _MAKERS)
    form = _MAKERS[name][0]
    if not argument:
        raise FedShuffleError(f"it is incomplete: write {form!r}.")
    options: dict[str, str] = {}
    for option in rest:
        key, _, value = option.partition(":")
        check_known("option of an availability", key, _OPTIONS)
        if bool(value) != _OPTIONS[key] or (key == "gaps" and "trace:" not in main):
            written = {"leaves": "+leaves:0.1", "drop": "+drop", "gaps": "trace:FILE+gaps"}[key]
            raise FedShuffleError(f"write {written!r}.")
        if key in options:
            raise FedShuffleError(f"give {key!r} once.")
        options[key] = value
    return name, argument, options


def _make(name: str, argument: str, population: _Population) -> Availability:
    form, make = _MAKERS[name]
    try:
        return make(argument, population)
    except FedShuffleError:
        raise
    except (ValueError, TypeError, LookupError) as error:
        raise FedShuffleError(f"{name}:{argument} cannot be read: write {form!r}.") from error


def _numbers(text: str, what: str) -> FloatArray:
    return np.array([number(word, what) for word in text.split(",")])


def _each(text: str, population: _Population, what: str) -> FloatArray:
    return per_client(_numbers(text, what), population.clients, what)


def _markov(argument: str, population: _Population) -> Markov:
    """``on=...,off=...``: a name begins a list of numbers."""
    rates: dict[str, list[str]] = {}
    for word in argument.split(","):
        name, equals, value = word.rpartition("=")
        if equals and name.strip() in rates:
            raise FedShuffleError(f"{name.strip()!r} is given twice: list the clients' rates once.")
        if equals:
            rates[name.strip()] = []
        rates[name.strip() if equals else [*rates][-1]].append(value)
    on, off = (",".join(rates.pop(name)) for name in ("on", "off"))
    if rates:
        raise ValueError(rates)
    return Markov(_each(on, population, "on rates"), _each(off, population, "off rates"))


def _cyclic(argument: str, population: _Population) -> Cyclic:
    period, share, *zones = argument.split(":")
    length = count(int(period), "the period of day and night")
    if len(zones) > 1:
        raise ValueError(zones)
    if zones:
        offsets: IntArray = np.array([int(word) for word in zones[0].split(",")])
        offsets = per_client(offsets, population.clients, "time zones")
    else:  # a property of the population: the same for every seed of a run
        rng = generator(0, Purpose.AVAILABILITY)
        offsets = rng.integers(length, size=population.clients)
    return Cyclic(offsets, length, float(share))


def _groups(argument: str, population: _Population) -> Groups:
    first, colon, rest = argument.partition(":")
    if not colon:
        raise ValueError(argument)
    labels, n = np.array([int(word) for word in first.split(",")]), population.clients
    if len(labels) == 1 and n > 1:
        labels = np.arange(n) * count(int(labels[0]), "the number of groups", most=n) // n
    labels = per_client(labels, n, "groups")
    name, inner, options = _read(rest)
    if options:
        raise ValueError(options)
    of = replace(population, clients=int(labels.max()) + 1, ids=None)
    return Groups(labels, _make(name, inner, of))


def _drifting(argument: str, population: _Population) -> Drifting:
    first, last, *given = argument.split(":")
    rounds = int(given[0]) if given else population.rounds
    if len(given) > 1:
        raise ValueError(given)
    if rounds is None:
        raise FedShuffleError(
            "a drift goes over the rounds of the run: give rounds, or write"
            f" 'drifting:{argument}:ROUNDS'."
        )
    begin, end = (_each(text, population, "probabilities") for text in (first, last))
    return Drifting(begin, end, rounds)


def _trace(file: str, population: _Population) -> Trace:
    ids = population.ids or range(population.clients)
    return Trace.read(population.folder / file, ids, allow_gaps=population.gaps)


_Maker = Callable[[str, _Population], Availability]
_MAKERS: dict[str, tuple[str, _Maker]] = {
    "independent": (
        "independent:q1,q2,...",
        lambda q, of: Independent(_each(q, of, "probabilities to be available")),
    ),
    "markov": ("markov:on=0.1,off=0.2", _markov),
    "cyclic": ("cyclic:PERIOD:SHARE[:ZONES]", _cyclic),
    "groups": ("groups:LABELS:KIND", _groups),
    "drifting": ("drifting:FIRST:LAST[:ROUNDS]", _drifting),
    "trace": ("trace:FILE", _trace),
}
