"""Local work: how many steps a client takes in a round, and on which minibatches."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final, get_args

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, count, counts, expect, number
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.randomness import Draw, Purpose, Rewound, generator

Order = Literal["reshuffled", "replacement", "once", "sequential"]
ORDERS: tuple[str, ...] = get_args(Order)

_MOST_STEPS = 2.0**52
"""Numbers of steps are kept below this, so that they are exact also as floats."""


@final
@dataclass(frozen=True)
class EpochRange:
    """A number of epochs drawn uniformly from ``low..high`` for every client and round."""

    low: int
    high: int

    def __post_init__(self) -> None:
        count(self.low, "the fewest epochs")
        count(self.high, "the most epochs")
        if self.low > self.high:
            raise FedShuffleError(f"the range of epochs {self.low}..{self.high} is empty.")
        if self.high - self.low >= 1000:
            raise FedShuffleError(
                f"the range of epochs {self.low}..{self.high} is too wide: use fewer than 1000."
            )


class Interruption(abc.ABC):
    """How many of its planned steps a client really does."""

    random: bool
    """Whether the answer depends on chance (the audit then samples)."""

    @abc.abstractmethod
    def done(self, planned: IntArray, clients: IntArray, seed: int, round: int) -> IntArray:
        """Steps done, from 1 to ``planned``, for each of the clients."""


@final
@dataclass(frozen=True)
class MissLast(Interruption):
    """Every client misses its last steps, but does at least one."""

    steps: int = 1
    random = False

    def __post_init__(self) -> None:
        count(self.steps, "the number of missed steps")

    def done(self, planned: IntArray, clients: IntArray, seed: int, round: int) -> IntArray:
        return np.maximum(planned - self.steps, 1)


@final
@dataclass(frozen=True)
class AtMost(Interruption):
    """A time limit: no client does more than so many steps."""

    steps: int
    random = False

    def __post_init__(self) -> None:
        count(self.steps, "the most steps a client can do")

    def done(self, planned: IntArray, clients: IntArray, seed: int, round: int) -> IntArray:
        return np.minimum(planned, self.steps)


@final
@dataclass(frozen=True)
class RandomStop(Interruption):
    """With this probability a client stops early, after a uniform number of its planned steps."""

    probability: float
    random = True

    def __post_init__(self) -> None:
        if not 0 <= number(self.probability, "the probability of stopping early") <= 1:
            raise FedShuffleError(
                f"the probability of stopping early is {self.probability}; choose one in [0, 1]."
            )

    def done(self, planned: IntArray, clients: IntArray, seed: int, round: int) -> IntArray:
        result = planned.copy()
        draw = Rewound()
        for k, client in enumerate(clients.tolist()):
            rng = draw(seed, Purpose.INTERRUPTION, round=round, client=client)
            if rng.random() < self.probability:
                result[k] = rng.integers(1, planned[k], endpoint=True)
        return result


@final
@dataclass(frozen=True)
class LocalWork:
    """What a sampled client is asked to do.

    With batch size B, client i has ``k_i = ceil(|D_i| / B)`` steps per epoch (the last minibatch
    may be smaller, and a client smaller than the batch has one step) and ``tau_i = E_i k_i`` steps.

    Args:
        epochs: one number for all, a number per client, or an :class:`EpochRange`.
        steps: instead of epochs, the same number of steps for every client: a number, or the
            ``"min"`` or ``"mean"`` (rounded) over the cohort of the steps that epochs would give.
        batch_size: examples per step.
        order: ``"reshuffled"`` anew every epoch, with ``"replacement"``, shuffled ``"once"`` and
            for all, or ``"sequential"``.
        interruption: how much of the plan gets done; all of it by default.
        clip: the largest norm of a minibatch's gradient; longer ones are scaled down to it.
        weight_decay: adds ``weight_decay / 2 |x|^2`` to every client's objective.

    >>> LocalWork(epochs=2, batch_size=32).on(np.array([10, 100])).longest
    8
    """

    epochs: int | Sequence[int] | EpochRange = 1
    steps: int | Literal["min", "mean"] | None = None
    batch_size: int = 1
    order: Order = "reshuffled"
    interruption: Interruption | None = None
    clip: float = math.inf
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not number(self.clip, "clip") > 0:
            raise FedShuffleError(f"clip is {self.clip}, but a largest norm must be positive.")
        if not 0 <= number(self.weight_decay, "weight_decay") < math.inf:
            raise FedShuffleError(f"weight_decay is {self.weight_decay}, but must be 0 or more.")
        # A number of numpy's is one, too, but not everybody downstream knows that.
        object.__setattr__(self, "batch_size", count(self.batch_size, "batch size"))
        if self.interruption is not None:
            expect(self.interruption, Interruption, "interruption")
        if self.order not in ORDERS:
            raise unknown("order", self.order, ORDERS)
        if isinstance(self.steps, str):
            if self.steps not in ("min", "mean"):
                raise unknown("number of steps", self.steps, ("min", "mean"))
        elif self.steps is not None:
            count(self.steps, "the number of steps")
        if np.ndim(self.epochs) == 0 and not isinstance(self.epochs, EpochRange):  # type: ignore[arg-type]
            count(self.epochs, "the number of epochs")
        elif not isinstance(self.epochs, EpochRange):
            counts(self.epochs, "epochs")

    def on(self, sizes: IntArray) -> Workload:
        """The work for clients of these sizes."""
        return Workload(self, sizes)


class Plan(NamedTuple):
    """The steps of a cohort in one round."""

    planned: IntArray
    done: IntArray


@final
class Workload:
    """Local work for given client sizes."""

    def __init__(self, work: LocalWork, sizes: IntArray) -> None:
        self.work = work
        self.sizes = sizes
        self.steps_per_epoch = -(-sizes // min(work.batch_size, int(sizes.max())))
        if not isinstance(work.epochs, EpochRange) and np.size(work.epochs) not in (1, len(sizes)):
            raise FedShuffleError(
                f"epochs lists {np.size(work.epochs)} numbers for {len(sizes)} clients: give one"
                " for each, or one for all."
            )
        most = work.epochs.high if isinstance(work.epochs, EpochRange) else np.max(work.epochs)
        if float(most) * float(sizes.max()) > _MOST_STEPS:
            raise FedShuffleError(
                f"{most} epochs over a client with {sizes.max()} examples are too many to count."
                " Use fewer epochs."
            )

    @functools.cached_property
    def alone(self) -> tuple[IntArray, FloatArray]:
        """The steps each client may be given by its epochs: values (n, A), chances (A,)."""
        if self.work.steps is not None and not isinstance(self.work.steps, str):
            return np.full((len(self.sizes), 1), self.work.steps), np.ones(1)
        if isinstance(self.work.epochs, EpochRange):
            epochs = np.arange(self.work.epochs.low, self.work.epochs.high + 1)
            return np.outer(self.steps_per_epoch, epochs), np.full(len(epochs), 1 / len(epochs))
        steps = self.steps_per_epoch * np.asarray(self.work.epochs, dtype=np.int64)
        return steps[:, None], np.ones(1)

    @property
    def _drawn(self) -> EpochRange | None:
        """What the epochs are drawn from, if they are and if steps follow from epochs."""
        fixed = self.work.steps is not None and not isinstance(self.work.steps, str)
        return self.work.epochs if isinstance(self.work.epochs, EpochRange) and not fixed else None

    @functools.cached_property
    def longest(self) -> int:
        """The most steps that any client may be asked for."""
        if self._drawn is not None:
            return int(self.steps_per_epoch.max()) * self._drawn.high
        return int(self.alone[0].max())

    def plan(self, cohort: IntArray, seed: int, round: int) -> Plan:
        """Steps planned and done by each client of a cohort: pure in (seed, round, client)."""
        planned = self._planned(cohort, seed, round)
        return Plan(planned, self.done(planned, cohort, seed, round))

    def done(self, planned: IntArray, cohort: IntArray, seed: int, round: int) -> IntArray:
        """How many of its planned steps each client of a cohort does."""
        if self.work.interruption is None or not len(cohort):
            return planned
        done = self.work.interruption.done(planned, cohort, seed, round)
        if ((done < 1) | (done > planned)).any():
            raise FedShuffleError(
                f"{self.work.interruption!r} left a client with {done.min()} steps done."
                " Leave at least 1 and at most the planned number; a client that did nothing"
                " did not take part, which is the sampling's to say."
            )
        return done

    def _planned(self, cohort: IntArray, seed: int, round: int) -> IntArray:
        if self._drawn is None:
            return self.together(self.alone[0][cohort, 0])
        low, high = self._drawn.low, self._drawn.high
        draw = Rewound()
        more = [  # for the cohort only: the table of all clients may be too large to make
            draw(seed, Purpose.EPOCHS, round=round, client=client).integers(high - low + 1)
            for client in cohort.tolist()
        ]
        planned = self.steps_per_epoch[cohort] * (low + np.array(more, dtype=np.int64))
        return self.together(planned)

    def together(self, planned: IntArray) -> IntArray:
        """The steps of a cohort, where its members agree on the minimum or the mean."""
        if not isinstance(self.work.steps, str) or not len(planned):
            return planned
        common = planned.min() if self.work.steps == "min" else round(float(planned.mean()))
        return np.full_like(planned, common)

    def stream(self, client: int, steps: int, seed: int, round: int) -> Minibatches:
        """The minibatches of one client in one round."""
        work = self.work
        size = int(self.sizes[client])
        batch_size = min(work.batch_size, size)
        return Minibatches(client, size, steps, batch_size, work.order, seed, round)


@final
@dataclass(frozen=True, slots=True)
class Minibatches:
    """The minibatches a client walks through, as positions among its own examples.

    Iterate to get one index array per step. In a reshuffled epoch every example comes exactly once.

        >>> [b.tolist() for b in Minibatches(0, 5, 3, 2, "sequential", seed=1, round=0)]
        [[0, 1], [2, 3], [4]]
    """

    client: int
    """Whose examples they are, in the federation at hand."""
    size: int
    steps: int
    batch_size: int
    order: Order
    seed: int
    round: int
    known_as: int | None = None
    """The client's number among all, by which its randomness is addressed, where only its own
    examples are at hand; None if it is ``client``."""
    enough: Callable[[], bool] | None = None
    """Asked before every minibatch: whether to end here, before all steps are done."""

    def __iter__(self) -> Iterator[IntArray]:
        for epoch in self.epochs():
            for begin in range(0, len(epoch), self.batch_size):
                if self.enough and self.enough():
                    return
                yield epoch[begin : begin + self.batch_size]

    @property
    def examples(self) -> int:
        """How many examples are visited, counted each time.

        >>> Minibatches(0, 5, 4, 2, "sequential", seed=1, round=0).examples
        7
        """
        whole, steps = divmod(self.steps, -(-self.size // self.batch_size))
        return whole * self.size + steps * self.batch_size

    def epochs(self, draw: Draw = generator) -> Iterator[IntArray]:
        """The positions of each epoch in order; the last one ends with the last step."""
        per_epoch = -(-self.size // self.batch_size)
        order = self._order(draw)
        for left in range(self.steps, 0, -per_epoch):
            yield order() if left >= per_epoch else order()[: left * self.batch_size]

    def positions(self, draw: Draw = generator) -> IntArray:
        """All positions in order, one epoch after another."""
        return np.concatenate(list(self.epochs(draw)))

    def portions(self, rows: int, draw: Draw = generator) -> Iterator[tuple[IntArray, list[int]]]:
        """Many minibatches at a time, about ``rows`` positions long: positions and lengths.

        >>> stream = Minibatches(0, 5, 6, 2, "sequential", seed=1, round=0)
        >>> [(positions.tolist(), lengths) for positions, lengths in stream.portions(100)]
        [([0, 1, 2, 3, 4, 0, 1, 2, 3, 4], [2, 2, 1, 2, 2, 1])]
        """
        if self.enough:  # asked step by step, so nothing can be gathered ahead
            yield from ((positions, [len(positions)]) for positions in self)
            return
        size = self.batch_size
        most = max(1, rows // size) * size
        pieces: list[IntArray] = []
        lengths: list[int] = []
        for epoch in self.epochs(draw):
            for begin in range(0, len(epoch), most):
                piece = epoch[begin : begin + most]
                whole, rest = divmod(len(piece), size)
                pieces.append(piece)
                lengths += [size] * whole + [rest] * (rest > 0)
                if len(lengths) * size >= most:
                    yield np.concatenate(pieces), lengths
                    pieces, lengths = [], []
        if pieces:
            yield np.concatenate(pieces), lengths

    def _order(self, draw: Draw) -> Callable[[], IntArray]:
        """What gives one order of the examples after another."""
        if self.order == "sequential":
            return lambda: np.arange(self.size)
        # A client that shuffles once and for all draws the same order in every round.
        once = self.order == "once"
        rng = draw(self.seed, Purpose.ORDER, round=0 if once else self.round + 1, client=self._own)
        if once:
            fixed = rng.permutation(self.size)
            return lambda: fixed
        if self.order == "reshuffled":
            return lambda: rng.permutation(self.size)
        return lambda: rng.integers(self.size, size=self.size)

    @property
    def _own(self) -> int:
        return self.client if self.known_as is None else self.known_as

    def model_seed(self) -> int:
        """The seed for the model's own randomness (dropout) at this client in this round."""
        rng = generator(self.seed, Purpose.MODEL, round=self.round, client=self._own)
        return int(rng.integers(1 << 63))
