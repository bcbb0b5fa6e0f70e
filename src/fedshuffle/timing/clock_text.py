"""Clocks written as text, and tables of measured devices."""

import csv
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray, number, vector
from fedshuffle.availability.base import per_client
from fedshuffle.errors import FedShuffleError, check_known, did_you_mean, error_context
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, uniforms
from fedshuffle.timing import jitter
from fedshuffle.timing.clock import Clock

_OPTIONS = ("jitter", "latency", "down", "up")
_TABLE = ("seconds", "latency", "down", "up")


@dataclass(frozen=True)
class _Population:
    """What the meaning of a text depends on: the clients, and where files are."""

    clients: int
    ids: Sequence[Hashable]
    folder: Path = field(default_factory=Path)


def parse(text: str, federation: Federation, folder: Path | None = None) -> Clock:
    """The clock that a text names, for this federation; files are found from ``folder``.

    >>> parse("fixed:0.1,0.4+jitter:exponential", Federation.from_sizes([1, 2]))
    0.1 to 0.4 seconds per step, jitter exponential
    """
    with _named(text):
        name, argument, options = _read(text)
        form, make = _MAKERS[name]
        try:
            clock = make(argument, _Population(len(federation), federation.ids, folder or Path()))
        except FedShuffleError:
            raise
        except (ValueError, TypeError) as error:
            raise FedShuffleError(f"it cannot be read: write {form!r}.") from error
        given: dict[str, Any] = {
            key: [number(word, key) for word in value.split(",")]
            for key, value in options.items()
            if key != "jitter"
        }
        if "jitter" in options:
            given["jitter"] = jitter.parse(options["jitter"])
        return clock.changed(**given)


def check(text: str) -> None:
    """Refuse a text that names no clock, before there is a federation."""
    with _named(text):
        _read(text)


def _named(text: str) -> AbstractContextManager[None]:
    return error_context(f"clock {text!r:.60}", FedShuffleError)


def resolve(
    clock: str | Clock | None, federation: Federation, folder: Path | None = None
) -> Clock | None:
    """A clock, given as text or as it is, that fits the federation.

    >>> len(resolve("fixed:0.1", Federation.from_sizes([1, 2, 3])))
    3
    """
    if clock is None:
        return None
    if isinstance(clock, str):
        clock = parse(clock, federation, folder)
    if not isinstance(clock, Clock):
        raise FedShuffleError(
            f"clock is {clock!r:.60}, but must be a text, such as 'lognormal:0.1:1', or a Clock."
        )
    if len(clock) == 1:
        each = {name: np.repeat(getattr(clock, name), len(federation)) for name in _TABLE}
        return clock.changed(**each)
    if len(clock) != len(federation):
        raise FedShuffleError(
            f"the clock is for {len(clock)} clients, but the federation has {len(federation)}."
        )
    return clock


def _read(text: str) -> tuple[str, str, dict[str, str]]:
    """The kind that a text names, its argument, and the options after it."""
    main, *rest = (part.strip() for part in re.split(r"\+(?!\d)", text))  # not in 1e+07
    name, _, argument = main.partition(":")
    check_known("clock", name, _MAKERS)
    if not argument:
        raise FedShuffleError(f"it is incomplete: write {_MAKERS[name][0]!r}.")
    options: dict[str, str] = {}
    for option in rest:
        key, _, value = option.partition(":")
        check_known("option of a clock", key, _OPTIONS)
        if key in options:
            raise FedShuffleError(f"{key} is given twice: leave out one of them.")
        options[key] = value
    return name, argument, options


def _numbers(text: str) -> FloatArray:
    return np.array([float(word) for word in text.split(",")])


def _each(text: str, population: _Population, what: str) -> FloatArray:
    return per_client(_numbers(text), population.clients, what)


def _fixed(argument: str, population: _Population) -> Clock:
    return Clock(_each(argument, population, "seconds"))


def _rates(argument: str, population: _Population) -> Clock:
    rates = vector(_each(argument, population, "rates"), "rates")
    return Clock(1 / rates, per="task", jitter=jitter.Exponential())


def _places(population: _Population) -> FloatArray:
    """A uniform number per client: a property of the population, the same for every seed."""
    return uniforms(0, Purpose.CLOCK, round=0, client=np.arange(population.clients), part=1)


def _lognormal(argument: str, population: _Population) -> Clock:
    from scipy import special  # slow to import: only when needed

    median, sigma = (float(word) for word in argument.split(":"))
    spread = number(sigma, "the sigma of log-normal devices", within="[0, inf)")
    z = special.ndtri(np.maximum(_places(population), 2.0**-54))
    return Clock(median * np.exp(spread * z))


def _classes(argument: str, population: _Population) -> Clock:
    pairs = [word.split("x") for word in argument.split(",")]
    shares = np.array(
        [number(share, "the share of a device class", "(0, 1]") for share, _ in pairs]
    )
    seconds = [number(value, "seconds of a device class", within="(0, inf)") for _, value in pairs]
    if abs(shares.sum() - 1) > 1e-6:
        raise FedShuffleError(f"the shares of device classes sum to {shares.sum():g}, not to 1.")
    # Of every class its share of the clients, up to rounding; who is in it is random.
    ends = np.round(np.cumsum(shares) * population.clients).astype(np.int64)
    place = np.searchsorted(ends[:-1], np.argsort(np.argsort(_places(population))), side="right")
    return Clock(np.array(seconds)[place])


def _table(argument: str, population: _Population) -> Clock:
    """Every client of the federation once; columns after ``seconds`` are optional."""
    path = population.folder / argument
    place = {str(id): i for i, id in enumerate(population.ids)}
    found: dict[str, FloatArray] = {}
    known = np.zeros(len(place), dtype=np.bool_)
    fails = error_context(lambda e: f"cannot read {str(path)!r}: {e}.", (OSError, UnicodeError))
    with fails, path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        columns = [name.strip() for name in rows.fieldnames or ()]
        if (
            columns[:2] != ["client", "seconds"]
            or {*columns[2:]} - {*_TABLE}
            or len(columns) > len({*columns})
        ):
            raise FedShuffleError(
                f"{path}: the first line is {','.join(columns)!r}, but must be 'client,seconds' and"
                " perhaps latency, down, up."
            )
        rows.fieldnames = columns
        for row in rows:
            with error_context(f"{path}, line {rows.line_num}", FedShuffleError):
                if None in row:
                    given = len(columns) + len(row[None])
                    raise FedShuffleError(f"there are {given} values for {len(columns)} columns.")
                client = str(row["client"]).strip()
                if client not in place:
                    raise FedShuffleError(
                        f"there is no client {client!r}.{did_you_mean(client, list(place)[:1000])}"
                    )
                if known[place[client]]:
                    raise FedShuffleError(f"client {client!r} is named twice.")
                known[place[client]] = True
                for name in columns[1:]:
                    values = found.setdefault(name, np.zeros(len(place)))
                    values[place[client]] = number(row[name], name)
    for i in np.flatnonzero(~known).tolist():
        raise FedShuffleError(f"{path} has no line for client {population.ids[i]!r}: add one.")
    return Clock(found.pop("seconds")).changed(**found)


_Maker = Callable[[str, _Population], Clock]
_MAKERS: dict[str, tuple[str, _Maker]] = {
    "fixed": ("fixed:SECONDS", _fixed),
    "rates": ("rates:4,2,1,0.5", _rates),
    "lognormal": ("lognormal:MEDIAN:SIGMA", _lognormal),
    "classes": ("classes:0.7x0.1,0.3x1", _classes),
    "table": ("table:FILE", _table),
}
