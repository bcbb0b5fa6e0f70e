"""Every random number is a pure function of (seed, round, client, purpose).

A counter-based generator (Philox, Salmon et al. 2011) needs no stream to be advanced in order: the
seed and the purpose form its key, the round and the client its counter. So any cohort, any epoch
order and any interruption can be drawn again alone, on any machine, in any order, and two of them
never share a number.

    >>> first = generator(7, Purpose.COHORT, round=3).integers(100, size=3)
    >>> again = generator(7, Purpose.COHORT, round=3).integers(100, size=3)
    >>> bool((first == again).all())
    True
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from fedshuffle.errors import FedShuffleError

_WORD = 1 << 64


class Purpose(enum.IntEnum):
    """What a random stream is for. The numbers are part of the promise: never renumber them."""

    COHORT = 1
    EPOCHS = 2
    ORDER = 3
    INTERRUPTION = 4
    MODEL = 5
    MONTE_CARLO = 6
    SPLIT = 7
    START = 8
    SUBSET = 9
    SELECTION = 10
    CONSTANTS = 11


def generator(
    seed: int, purpose: Purpose, *, round: int = 0, client: int = 0
) -> np.random.Generator:
    """The generator for one purpose in one round at one client."""
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([0, 0, client, round], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class Rewound:
    """The same generators as :func:`generator`, but always one and the same object, set back.

    Eight times as quick, for those who need many short streams one after another. What a call
    returns is good until the next call.

        >>> rewound = Rewound()
        >>> rewound(7, Purpose.ORDER, round=3, client=2).permutation(4).tolist() == (
        ...     generator(7, Purpose.ORDER, round=3, client=2).permutation(4).tolist()
        ... )
        True
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(0)
        self._generator = np.random.Generator(self._bits)
        self._key, self._counter = np.zeros(2, np.uint64), np.zeros(4, np.uint64)
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"key": self._key, "counter": self._counter},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def __call__(
        self, seed: int, purpose: Purpose, *, round: int = 0, client: int = 0
    ) -> np.random.Generator:
        self._key[0], self._key[1] = seed, purpose
        self._counter[2], self._counter[3] = client, round
        self._bits.state = self._state
        return self._generator


Draw = Callable[..., np.random.Generator]
"""Either of the two above."""


def check_seed(seed: int) -> int:
    """The seed as an int, or a clear error."""
    try:
        value = operator.index(seed)
    except TypeError:
        value = -1
    if not 0 <= value < _WORD:
        raise FedShuffleError(
            f"seed {seed!r} is not a whole number from 0 to 2**64 - 1. Choose one, such as 123."
        )
    return value
