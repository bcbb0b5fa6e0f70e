"""Local work: how many steps a client takes in a round, and on which minibatches."""

import abc
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, count, counts, expect, number
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.local_optimisers import SGD, LocalOptimiser
from fedshuffle.randomness import Address, Draw, Purpose, ReusableGenerator, generator

ExampleOrder = Literal["reshuffled", "replacement", "once", "sequential"]
ORDERS: tuple[str, ...] = get_args(ExampleOrder)

WHOLE_CLIENT = sys.maxsize
"""A batch size that puts all examples of a client into one step."""

_DEFAULTS: Mapping[str, Any] = {
    "epochs": 1,
    "batch_size": 1,
    "order": "reshuffled",
    "optimiser": SGD,
}

_MAX_STEPS = 2.0**52
"""Above this number, steps are not exact as floats."""


@dataclass(frozen=True)
class EpochRange:
    """A number of epochs drawn uniformly from ``low..high`` for every client and round.

    >>> LocalWork(epochs=EpochRange(2, 5)).epochs
    EpochRange(low=2, high=5)
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        count(self.low, "the fewest epochs")
        count(self.high, "the most epochs", self.low, self.low + 999)


class Interruption(abc.ABC):
    """How many of its planned steps a client does."""

    random: bool
    """Whether the number is random; the audit then samples."""

    @abc.abstractmethod
    def done(self, planned: IntArray, clients: IntArray, seed: int, round: int) -> IntArray:
        """Steps done, from 1 to ``planned``, for each of the clients."""


@dataclass(frozen=True)
class MissLast(Interruption):
    """Every client misses its last steps, but does at least one.

    >>> MissLast(2).done(np.array([1, 5]), np.arange(2), seed=0, round=0).tolist()
    [1, 3]
    """

    steps: int = 1
    random = False

    def __post_init__(self) -> None:
        count(self.steps, "the number of missed steps")

    def done(self, planned: IntArray, clients: IntArray, seed: int, round: int) -> IntArray:
        return np.maximum(planned - self.steps, 1)


@dataclass(frozen=True)
class AtMost(Interruption):
    """A time limit: no client does more than this number of steps.

    >>> AtMost(3).done(np.array([1, 5]), np.arange(2), seed=0, round=0).tolist()
    [1, 3]
    """

    steps: int
    random = False

    def __post_init__(self) -> None:
        count(self.steps, "the most steps a client can do")

    def done(self, planned: IntArray, clients: IntArray, seed: int, round: int) -> IntArray:
        return np.minimum(planned, self.steps)


@dataclass(frozen=True)
class RandomStop(Interruption):
    """With this probability a client stops early, after a uniform number of its planned steps.

    >>> RandomStop(0.5).done(np.array([9, 9, 9]), np.arange(3), seed=2, round=0).tolist()
    [4, 6, 9]
    """

    probability: float
    random = True

    def __post_init__(self) -> None:
        number(self.probability, "the probability of stopping early", within="[0, 1]")

    def done(self, planned: IntArray, clients: IntArray, seed: int, round: int) -> IntArray:
        result = planned.copy()
        draw = ReusableGenerator()
        for k, client in enumerate(clients.tolist()):
            rng = draw(seed, Purpose.INTERRUPTION, round=round, client=client)
            if rng.random() < self.probability:
                result[k] = rng.integers(1, planned[k], endpoint=True)
        return result


@dataclass(frozen=True)
class LocalWork:
    """What a sampled client is asked to do.

    With batch size B, client i has ``k_i = ceil(|D_i| / B)`` steps per epoch (the last minibatch
    may be smaller, and a client smaller than the batch has one step) and ``tau_i = E_i k_i`` steps.
    A part that is None is unset: the method may fix it, else the default applies. A method that
    fixes a part refuses another value of it.

    Args:
        epochs: one number for all, a number per client, or an :class:`EpochRange`; 1 by default.
        steps: instead of epochs, the same number of steps for every client: a number, or the
            ``"min"`` or ``"mean"`` (rounded) over the cohort of the steps that epochs would give.
        batch_size: examples per step; 1 by default.
        order: ``"reshuffled"`` in every epoch (the default), with ``"replacement"``, shuffled
            ``"once"`` for all rounds, or ``"sequential"``.
        interruption: how many of the planned steps are done; all of them by default.
        clip: the largest norm of a minibatch's gradient; longer ones are scaled down to it.
        weight_decay: adds ``weight_decay / 2 |x|^2`` to every client's objective.
        optimiser: what makes steps of the gradients, as text (``"sgd:momentum=0.9"``, ``"adamw"``),
            a class of torch.optim, or a :class:`~fedshuffle.local_optimisers.LocalOptimiser`;
            plain ``"sgd"`` by default. Each client makes a new one in every round.

    >>> LocalWork(epochs=2, batch_size=32).on(np.array([10, 100])).max_steps
    8
    """

    epochs: int | Sequence[int] | EpochRange | None = None
    steps: int | Literal["min", "mean"] | None = None
    batch_size: int | None = None
    order: ExampleOrder | None = None
    interruption: Interruption | None = None
    clip: float = math.inf
    weight_decay: float = 0.0
    optimiser: LocalOptimiser | str | type | None = None

    def __post_init__(self) -> None:
        if self.optimiser is not None:
            object.__setattr__(self, "optimiser", LocalOptimiser.of(self.optimiser))
        number(self.clip, "clip", within="(0, inf]")
        number(self.weight_decay, "weight_decay", within="[0, inf)")
        if self.batch_size is not None:  # a Python int also if numpy's is given
            object.__setattr__(self, "batch_size", count(self.batch_size, "batch size"))
        if self.interruption is not None:
            expect(self.interruption, Interruption, "interruption")
        if self.order is not None and self.order not in ORDERS:
            raise unknown("order", self.order, ORDERS)
        if isinstance(self.steps, str):
            if self.steps not in ("min", "mean"):
                raise unknown("number of steps", self.steps, ("min", "mean"))
        elif self.steps is not None:
            count(self.steps, "the number of steps")
        epochs: Any = self.epochs
        if epochs is not None and not isinstance(epochs, EpochRange):
            check = counts if np.ndim(epochs) else count
            check(epochs, "epochs")

    def resolved(self) -> "LocalWork":
        """This work with the default of every unset part."""
        unset = {name: v for name, v in _DEFAULTS.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **unset)

    def on(self, sizes: IntArray) -> "Workload":
        """The work for clients of these sizes."""
        return Workload(self, sizes)


class StepCounts(NamedTuple):
    """The steps of each client of a cohort in one round."""

    planned: IntArray
    done: IntArray


class Workload:
    """Local work for given client sizes."""

    def __init__(self, work: LocalWork, sizes: IntArray) -> None:
        self.work = work = work.resolved()
        self.sizes = sizes
        assert work.batch_size is not None
        self.batch_size: int = work.batch_size
        assert isinstance(work.optimiser, LocalOptimiser)
        self.optimiser: LocalOptimiser = work.optimiser
        self.steps_per_epoch = -(-sizes // min(self.batch_size, int(sizes.max())))
        epochs: Any = work.epochs
        if not isinstance(epochs, EpochRange) and np.size(epochs) not in (1, len(sizes)):
            raise FedShuffleError(
                f"epochs lists {np.size(epochs)} numbers for {len(sizes)} clients: give one"
                " for each, or one for all."
            )
        most = epochs.high if isinstance(epochs, EpochRange) else np.max(epochs)
        if float(most) * float(sizes.max()) > _MAX_STEPS:
            raise FedShuffleError(
                f"{most} epochs over a client with {sizes.max()} examples are too many to count."
                " Use fewer epochs."
            )
        fixed = work.steps is not None and not isinstance(work.steps, str)
        self._fixed_steps = work.steps if fixed else None
        self._range = epochs if isinstance(epochs, EpochRange) and not fixed else None

    @functools.cached_property
    def possible_steps(self) -> tuple[IntArray, FloatArray]:
        """The steps each client may be given by its epochs: values (n, A), probabilities (A,)."""
        if self._fixed_steps is not None:
            return np.full((len(self.sizes), 1), self._fixed_steps), np.ones(1)
        if self._range is not None:
            epochs = np.arange(self._range.low, self._range.high + 1)
            return np.outer(self.steps_per_epoch, epochs), np.full(len(epochs), 1 / len(epochs))
        steps = self.steps_per_epoch * np.asarray(self.work.epochs, dtype=np.int64)
        return steps[:, None], np.ones(1)

    @functools.cached_property
    def max_steps(self) -> int:
        """The largest number of local steps of any client."""
        if self._range is not None:
            return int(self.steps_per_epoch.max()) * self._range.high
        return int(self.possible_steps[0].max())

    def plan(self, cohort: IntArray, seed: int, round: int) -> StepCounts:
        """Steps planned and done by each client of a cohort: pure in (seed, round, client)."""
        planned = self.planned(cohort, seed, round)
        return StepCounts(planned, self.done(planned, cohort, seed, round))

    def planned(self, cohort: IntArray, seed: int, round: int) -> IntArray:
        """Steps planned by each client of a cohort."""
        if self._range is None:
            return self.cohort_steps(self.possible_steps[0][cohort, 0])
        # For the cohort only: the table of all clients may be too large.
        low, high = self._range.low, self._range.high
        draw = ReusableGenerator()
        more = [
            draw(seed, Purpose.EPOCHS, round=round, client=client).integers(high - low + 1)
            for client in cohort.tolist()
        ]
        return self.cohort_steps(
            self.steps_per_epoch[cohort] * (low + np.array(more, dtype=np.int64))
        )

    def done(self, planned: IntArray, cohort: IntArray, seed: int, round: int) -> IntArray:
        """How many of its planned steps each client of a cohort does."""
        if self.work.interruption is None or not len(cohort):
            return planned
        done = self.work.interruption.done(planned, cohort, seed, round)
        if ((done < 1) | (done > planned)).any():
            raise FedShuffleError(
                f"{self.work.interruption!r} left a client with {done.min()} steps done. Leave at"
                " least 1 and at most the planned number; which clients take part is the"
                " sampling's choice."
            )
        return done

    def cohort_steps(self, planned: IntArray) -> IntArray:
        """The steps of a cohort, where its members agree on the minimum or the mean."""
        if not isinstance(self.work.steps, str) or not len(planned):
            return planned
        common = planned.min() if self.work.steps == "min" else round(float(planned.mean()))
        return np.full_like(planned, common)

    def minibatches(self, client: int, steps: int, seed: int, round: int) -> "Minibatches":
        """The minibatches of one client in one round."""
        size = int(self.sizes[client])
        assert self.work.order is not None
        batch_size = min(self.batch_size, size)
        return Minibatches(client, size, steps, batch_size, self.work.order, seed, round)


@dataclass(frozen=True, slots=True)
class Minibatches:
    """The minibatches of a client in a round, as positions among its own examples.

    Iterate to get one index array per step. A reshuffled epoch has every example exactly once.

        >>> [b.tolist() for b in Minibatches(0, 5, 3, 2, "sequential", seed=1, round=0)]
        [[0, 1], [2, 3], [4]]
    """

    client: int
    """The client's number in the federation at hand."""
    size: int
    steps: int
    batch_size: int
    order: ExampleOrder
    seed: int
    round: int
    stream_id: int | None = None
    """The client's number among all, which addresses its randomness; None if it is ``client``. They
    differ where a federation holds only the client's own examples."""
    should_stop: Callable[[], bool] | None = None
    """Called before every minibatch: whether to stop before all steps are done."""

    def __iter__(self) -> Iterator[IntArray]:
        for epoch in self.epochs():
            for begin in range(0, len(epoch), self.batch_size):
                if self.should_stop and self.should_stop():
                    return
                yield epoch[begin : begin + self.batch_size]

    @property
    def examples(self) -> int:
        """Number of examples visited, counted each time.

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
        if self.should_stop:  # called step by step, so nothing can be gathered ahead
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
        """A function that returns the order of the examples in the next epoch."""
        if self.order == "sequential":
            return lambda: np.arange(self.size)
        # A client that shuffles once draws the same order in every round.
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
        return self.client if self.stream_id is None else self.stream_id

    def address(self, step: int) -> Address:
        """Where the random numbers of a step's examples are drawn, such as augmentations.

        >>> Minibatches(0, 5, 3, 2, "sequential", seed=1, round=7).address(step=2)
        Address(seed=1, round=7, client=0, part=2)
        """
        return Address(self.seed, self.round, self._own, step)

    def model_seed(self) -> int:
        """The seed for the model's own randomness (dropout) at this client in this round."""
        rng = generator(self.seed, Purpose.MODEL, round=self.round, client=self._own)
        return int(rng.integers(1 << 63))
