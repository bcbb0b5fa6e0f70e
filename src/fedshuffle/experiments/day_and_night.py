"""A day-and-night population: the digits of 60 clients that come and go.

A round is an hour. The images of handwritten digits that come with scikit-learn are split over 60
clients, which are there from 2 to 20 hours of every day. Those who are there for at most 4 hours
come by night; they hold fewer examples, and other digits. In the drift the hours change from day to
day: on the first they are those of the client at the other end of the line, on the last its own.
"""

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray
from fedshuffle.availability import Trace
from fedshuffle.experiments import digits
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, generator

CLIENTS = 60
DAY, DAYS = 24, 10  # hours, and days of a drift
_FEWEST_HOURS, _MOST_HOURS, _NIGHT_HOURS = 2, 20, 4
_NIGHT, _NOON, _ZONES = 2, 14, 3  # when clients are there, and the deviation of their time zones

POPULATIONS = {"day-and-night": "Day and night", "drift": "Drift"}
"""Each is one comparison, in the folder of this name."""


def hours() -> FloatArray:
    """How long each client is there per day, in ascending order."""
    ratio = _MOST_HOURS / _FEWEST_HOURS
    return np.round(_FEWEST_HOURS * ratio ** np.linspace(0, 1, CLIENTS))


def night() -> NDArray[np.bool_]:
    """Which clients come by night."""
    return hours() <= _NIGHT_HOURS


def there(population: str) -> NDArray[np.bool_]:
    """Whether each client (column) is there in each round, until it all repeats."""
    last = hours()
    if population == "day-and-night":
        by_day = last[None]
    else:
        share = np.linspace(0, 1, DAYS)[:, None]
        by_day = np.round(last[::-1] ** (1 - share) * last**share)
    rng = generator(0, Purpose.AVAILABILITY)
    middle = np.where(night(), _NIGHT, _NOON) + _ZONES * rng.standard_normal(CLIENTS)
    begin = np.round(middle - by_day / 2)
    since = (np.arange(DAY)[:, None] - begin[:, None]) % DAY  # by day, hour and client
    return (since < by_day[:, None]).reshape(-1, CLIENTS)


def intervals(population: str) -> list[dict[str, int]]:
    """The lines of a trace, see :mod:`fedshuffle.availability.trace`."""
    edge = np.zeros((1, CLIENTS), dtype=np.int64)
    change = np.diff(np.concatenate([edge, there(population), edge]), axis=0).T
    clients, begins = np.nonzero(change == 1)
    ends = np.nonzero(change == -1)[1]
    columns = zip(clients.tolist(), begins.tolist(), ends.tolist(), strict=True)
    return [{"client": client, "begin": begin, "end": end} for client, begin, end in columns]


def trace(population: str) -> Trace:
    """The population as an availability."""
    lines = intervals(population)
    columns = ([line[name] for line in lines] for name in ("client", "begin", "end"))
    return Trace(CLIENTS, *columns)


def clients(part: str = "train") -> Federation:
    """The digits by client; every third example of a client is for testing."""
    return digits.clients(np.sqrt(hours()), part)
