"""Every random number is a pure function of (seed, round, client, purpose).

In a counter-based generator (Philox, Salmon et al. 2011) the seed and the purpose form the key, the
round and the client the counter. So any cohort, epoch order or interruption can be drawn again
alone, on any machine, in any order, and no two share a number.

    >>> first = generator(7, Purpose.COHORT, round=3).integers(100, size=3)
    >>> again = generator(7, Purpose.COHORT, round=3).integers(100, size=3)
    >>> bool((first == again).all())
    True
"""

import enum
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedshuffle._arrays import count


class Purpose(enum.IntEnum):
    """What a random stream is for. Results depend on the numbers: never change them."""

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
    TRANSFORM = 12
    SERVER_TRANSFORM = 13
    DOWN_LINK = 14
    PRIVACY = 15
    TUNING = 16


def generator(
    seed: int, purpose: Purpose, *, round: int = 0, client: int = 0, part: int = 0
) -> np.random.Generator:
    """The generator for one purpose in one round at one client, and there for one of its parts."""
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([0, part, client, round], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class ReusableGenerator:
    """The same streams as :func:`generator` from one object that is reset: eight times as fast for
    many short streams. A returned generator is valid until the next call.

        >>> draw, address = ReusableGenerator(), {"round": 3, "client": 2}
        >>> a, b = (make(7, Purpose.ORDER, **address) for make in (draw, generator))
        >>> a.permutation(4).tolist() == b.permutation(4).tolist()
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
        self, seed: int, purpose: Purpose, *, round: int = 0, client: int = 0, part: int = 0
    ) -> np.random.Generator:
        self._key[0], self._key[1] = seed, purpose
        self._counter[1], self._counter[2], self._counter[3] = part, client, round
        self._bits.state = self._state
        return self._generator


Draw = Callable[..., np.random.Generator]
"""Either :func:`generator` or a :class:`ReusableGenerator`."""


def check_seed(seed: int) -> int:
    """The seed as an int, or a clear error."""
    return count(seed, "seed", least=0, most=2**64 - 1)


@contextmanager
def restored_generators() -> Iterator[Callable[[], bool]]:
    """Restore the global generators of Python, numpy and torch at the end.

    Gives a function that returns whether any of them was used in between.
    """
    import torch

    def states() -> tuple[Any, ...]:
        name, key, *rest = tuple(np.random.get_state())
        numpy_state = (name, np.asarray(key).tolist(), *rest)
        return random.getstate(), numpy_state, torch.get_rng_state().tolist()

    before = states()
    try:
        yield lambda: states() != before
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(torch.tensor(before[2], dtype=torch.uint8))
