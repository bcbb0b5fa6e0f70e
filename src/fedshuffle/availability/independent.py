"""Clients that are there independently of the past: each by itself, or whole groups."""

from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, as_array, expect, frozen, vector
from fedshuffle.availability.base import Availability, BoolArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, uniforms


class Independent(Availability):
    """Client i is there with probability ``q_i``, independently of all others and of the past.

    >>> Independent([0.9, 0.5, 0.2]).available(seed=1, round=0, clients=np.arange(3)).tolist()
    [True, True, False]
    """

    def __init__(self, probabilities: ArrayLike) -> None:
        what = "probabilities to be available"
        self.probabilities: FloatArray = frozen(vector(probabilities, what, within="[0, 1]"))

    def __repr__(self) -> str:
        return f"independent, {self.probabilities.mean():.3g} of the time"

    def __len__(self) -> int:
        return len(self.probabilities)

    def available(self, seed: int, round: int, clients: IntArray) -> BoolArray:
        numbers = uniforms(seed, Purpose.AVAILABILITY, round=round, client=clients)
        return numbers < self.probabilities[clients]

    def at(self, round: int) -> Self:
        return self

    def probability(self, round: int) -> FloatArray:
        return self.probabilities


class Always(Availability):
    """All clients are there in every round.

    >>> Always(2).probability(round=0).tolist()
    [1.0, 1.0]
    """

    def __init__(self, n: int) -> None:
        self._n = n

    def __repr__(self) -> str:
        return "all are there"

    def __len__(self) -> int:
        return self._n

    def available(self, seed: int, round: int, clients: IntArray) -> BoolArray:
        return np.ones(len(clients), dtype=np.bool_)

    def at(self, round: int) -> Self:
        return self

    def probability(self, round: int) -> FloatArray:
        return np.ones(self._n)


class Groups(Availability):
    """All clients of a group come and go together, as the availability ``of`` says for groups.

    ``groups`` has the number of its group, from 0 on, for each client: a factory that works in
    shifts, or phones behind one provider.

        >>> shifts = Groups([0, 0, 1, 1], of=Independent([0.9, 0.5]))
        >>> shifts.probability(round=0).tolist()
        [0.9, 0.9, 0.5, 0.5]
    """

    def __init__(self, groups: ArrayLike, of: Availability) -> None:
        expect(of, Availability, "the availability of the groups")
        if of.leaves is not None:
            raise FedShuffleError(
                f"groups cannot be of clients that leave ({of!r}): each client leaves by itself, so"
                " write Leaving(Groups(...), leaves)."
            )
        labels = as_array(groups, "groups")
        if labels.ndim != 1 or not labels.size or labels.dtype.kind not in "iu":
            raise FedShuffleError(
                "groups must be a list with the number of a group for each client, such as"
                f" [0, 0, 1, 1]: got {groups!r:.60}."
            )
        if labels.min() < 0 or labels.max() >= len(of):
            raise FedShuffleError(
                f"groups go from {labels.min()} to {labels.max()}, but there are {len(of)}: number"
                f" them from 0 to {len(of) - 1}."
            )
        self.groups: IntArray = frozen(labels.astype(np.int64))
        self.of, self.period, self.repeats, self.drop = of, of.period, of.repeats, of.drop

    def __repr__(self) -> str:
        return f"{len(self.of)} groups, {self.of!r}"

    def __len__(self) -> int:
        return len(self.groups)

    def available(self, seed: int, round: int, clients: IntArray) -> BoolArray:
        present, where = np.unique(self.groups[clients], return_inverse=True)
        return self.of.available(seed, round, present)[where]

    def at(self, round: int) -> "Groups":
        of = self.of.at(round)
        return self if of is self.of else Groups(self.groups, of)

    def probability(self, round: int) -> FloatArray:
        return self.of.probability(round)[self.groups]


class Leaving(Availability):
    """An availability in which clients that are asked may leave before they answer.

    Each leaves with its own probability, and then takes no part in the round.

        >>> Leaving(Independent([0.9, 0.5]), [0.1, 0.2]).leaves.tolist()
        [0.1, 0.2]
    """

    def __init__(self, of: Availability, leaves: ArrayLike) -> None:
        expect(of, Availability, "the availability of clients that leave")
        if of.leaves is not None:
            raise FedShuffleError(
                f"the clients of {of!r} leave already: give one probability each."
            )
        what = "probabilities to leave"
        self.of, self.period, self.repeats, self.drop = of, of.period, of.repeats, of.drop
        self.leaves: FloatArray = frozen(vector(leaves, what, range(len(of)), within="[0, 1)"))

    def __repr__(self) -> str:
        return f"{self.of!r}, {self.leaves.mean():.3g} leave"

    def __len__(self) -> int:
        return len(self.of)

    def available(self, seed: int, round: int, clients: IntArray) -> BoolArray:
        return self.of.available(seed, round, clients)

    def at(self, round: int) -> "Leaving":
        of = self.of.at(round)
        return self if of is self.of else Leaving(of, self.leaves)

    def probability(self, round: int) -> FloatArray:
        return self.of.probability(round)
