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
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshuffle._arrays import FloatArray, count

if TYPE_CHECKING:
    import torch


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
    AVAILABILITY = 17
    EXAMPLES = 18
    CLOCK = 19
    DISPATCH = 20


def generator(
    seed: int, purpose: Purpose, *, round: int = 0, client: int = 0, part: int = 0
) -> np.random.Generator:
    """The generator for one purpose in one round at one client, and there for one of its parts."""
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([0, part, client, round], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class Address(NamedTuple):
    """Whose random numbers: those of a part, such as a local step, of a client's round."""

    seed: int = 0
    round: int = 0
    client: int = 0
    part: int = 0

    def generator(self, purpose: Purpose) -> np.random.Generator:
        """The generator at this address.

        >>> rng = Address(7, round=3).generator(Purpose.COHORT)
        >>> bool(rng.random() == generator(7, Purpose.COHORT, round=3).random())
        True
        """
        return generator(self.seed, purpose, round=self.round, client=self.client, part=self.part)


NO_ADDRESS = Address()
"""Where what is no part of a round draws, such as a first look at the model."""


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


def uniforms(
    seed: int, purpose: Purpose, *, round: ArrayLike, client: ArrayLike, part: int = 0
) -> FloatArray:
    """One number from [0, 1) for each pair of a round and a client; arrays are broadcast.

    Where a client needs a single number, this hash is a hundred times as fast as a stream: the
    finaliser of SplitMix64 (Steele, Lea and Flood 2014) takes in seed, purpose, part, round and
    client one after the other.

        >>> numbers = uniforms(7, Purpose.AVAILABILITY, round=3, client=np.arange(1000))
        >>> bool(numbers[5] == uniforms(7, Purpose.AVAILABILITY, round=3, client=5))
        True
        >>> round(float(numbers.mean()), 1)
        0.5
    """
    address = (seed, int(purpose), part, round, client)
    bits = np.zeros(1, dtype=np.uint64)  # arrays wrap around without a warning, numbers would warn
    for value in address:
        bits = _mixed(bits + np.atleast_1d(np.asarray(value).astype(np.uint64)) * _GOLDEN + _GOLDEN)
    numbers: FloatArray = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers.reshape(np.broadcast_shapes(np.shape(round), np.shape(client)))


def uniform(seed: int, purpose: Purpose, *, round: int, client: int, part: int = 0) -> float:
    """One number of :func:`uniforms`, without the cost of arrays.

    >>> address = {"round": 3, "client": 5}
    >>> uniform(7, Purpose.CLOCK, **address) == uniforms(7, Purpose.CLOCK, **address).item()
    True
    """
    bits = 0
    for value in (seed, int(purpose), part, round, client):
        bits = (bits + value * _STRIDE + _STRIDE) & _WORD
        for shift, factor in _MIXING:
            bits = (bits ^ (bits >> shift)) * factor & _WORD
        bits ^= bits >> 31
    return (bits >> 11) * 2.0**-53


_WORD = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15
_MIXING = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
_GOLDEN = np.uint64(_STRIDE)


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIXING:
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))


Draw = Callable[..., np.random.Generator]
"""Either :func:`generator` or a :class:`ReusableGenerator`."""


def check_seed(seed: int) -> int:
    """The seed as an int, or a clear error."""
    return count(seed, "seed", least=0, most=2**64 - 1)


_GLOBAL = threading.RLock()  # of the global generators, which all threads share
_numpy_random: Any = np.random  # its stubs lack what swaps the global generator


@contextmanager
def seeded_generators(
    rng: np.random.Generator, device: "torch.device | None" = None
) -> Iterator[None]:
    """The global generators of Python, numpy and torch as a function of ``rng``; then as before.

    Another thread waits until this one is done. It costs some microseconds, so that it can be done
    for every minibatch. ``device`` is a GPU whose generator is seeded as well.

    >>> import torch
    >>> with seeded_generators(generator(1, Purpose.EXAMPLES)):
    ...     first = random.random(), np.random.rand(), float(torch.rand(()))
    >>> with seeded_generators(generator(1, Purpose.EXAMPLES)):
    ...     first == (random.random(), np.random.rand(), float(torch.rand(())))
    True
    """
    import torch

    words = rng.integers(1 << 63, size=2).tolist()
    gpu = None if device is None or device.type == "cpu" else torch.get_device_module(device)
    with _GLOBAL:
        before = random.getstate(), _numpy_random.get_bit_generator(), torch.get_rng_state()
        on_gpu = gpu and gpu.get_rng_state(device)
        random.seed(words[0])
        _numpy_random.set_bit_generator(rng.bit_generator)
        torch.default_generator.manual_seed(words[1])
        if gpu:
            gpu.manual_seed(words[1])
        try:
            yield
        finally:
            random.setstate(before[0])
            _numpy_random.set_bit_generator(before[1])
            torch.set_rng_state(before[2])
            if gpu:
                gpu.set_rng_state(on_gpu, device)


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
