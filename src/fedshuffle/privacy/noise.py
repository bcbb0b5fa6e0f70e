r"""Gaussian noise on the aggregated update, independent per round or correlated over rounds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedshuffle._arrays import count, number
from fedshuffle.randomness import Purpose, generator
from fedshuffle.transforms import ClientContext, Message, ServerContext, Transform

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GaussianNoise(Transform):
    r"""Add :math:`N(0, \sigma^2 I)` to the aggregated update, also if nobody took part.

    >>> import torch
    >>> context = ServerContext(seed=0, round=0, state={}, metrics={})
    >>> noised, _ = GaussianNoise(2.0).server(torch.zeros(10_000), context)
    >>> round(float(noised.std()), 1)
    2.0
    """

    std: float
    mean = "unbiased"
    server_only = every_round = private = any_layout = True

    def __post_init__(self) -> None:
        number(self.std, "the std of GaussianNoise", within="(0, inf)")

    def client(self, updates: "Tensor", state: "Tensor | None", context: ClientContext) -> Message:
        return Message(updates)

    def server(
        self, update: "Tensor", context: ServerContext
    ) -> "tuple[Tensor, Mapping[str, Tensor]]":
        return with_noise(update, self.std, context.generator()), context.state


@dataclass(frozen=True)
class TreeNoise(Transform):
    r"""Noise for sums over rounds: binary-tree aggregation, with a new tree every ``rounds``.

    The sum of the first t updates of a tree gets the noise :math:`N_t = \sum_v n_v` of the nodes v
    that cover the rounds 1 to t, one for every bit of t, so the update of round t gets
    :math:`N_t - N_{t-1}`. Noise in the model grows with the logarithm of the rounds of a tree
    instead of their number. The noise of a node is a function of (seed, tree, level, index):
    nothing is kept.

    A client that takes part once per tree changes one node per level of it, so the sensitivity to
    it is larger, by a factor that follows from the tree.

    >>> import torch
    >>> noise, zero = TreeNoise(std=1.0, rounds=8), torch.zeros(10_000)
    >>> contexts = [ServerContext(seed=0, round=r, state={}, metrics={}) for r in range(8)]
    >>> total = sum(noise.server(zero, context)[0] for context in contexts)
    >>> round(float(total.std()), 1)  # one node covers all eight rounds
    1.0

    Reference: Kairouz et al., Practical and Private (Deep) Learning without Sampling or Shuffling,
    2021 (DP-FTRL).
    """

    std: float
    rounds: int
    mean = "unbiased"
    server_only = every_round = private = any_layout = True

    def __post_init__(self) -> None:
        number(self.std, "the std of TreeNoise", within="(0, inf)")
        count(self.rounds, "the rounds of TreeNoise")

    def client(self, updates: "Tensor", state: "Tensor | None", context: ClientContext) -> Message:
        return Message(updates)

    def server(
        self, update: "Tensor", context: ServerContext
    ) -> "tuple[Tensor, Mapping[str, Tensor]]":
        tree, before = divmod(context.round, self.rounds)
        for sign, level, index in tree_nodes(before + 1):
            # Up to 64 levels of each transform of a chain have their own numbers.
            node = {"round": tree, "client": index, "part": 64 * context.part + level}
            update = with_noise(
                update, sign * self.std, generator(context.seed, Purpose.PRIVACY, **node)
            )
        return update, context.state


def tree_nodes(step: int) -> Iterator[tuple[int, int, int]]:
    """The nodes (sign, level, index) whose noise a step adds or takes back, counted from 1. A node
    covers ``2 ** level`` steps, the first of which is ``index * 2 ** level``, counted from 0.

    >>> list(tree_nodes(3)), list(tree_nodes(4))
    ([(1, 0, 2)], [(1, 2, 0), (-1, 1, 0), (-1, 0, 2)])
    """
    level = (step & -step).bit_length() - 1  # the lowest bit of step
    yield 1, level, (step >> level) - 1
    for below in reversed(range(level)):
        yield -1, below, ((step - 1) >> below) - 1


def squared_sensitivity(rounds: int, separation: int) -> int:
    """The most nodes that one client changes in a number of rounds, if it takes part at most once
    in ``separation`` of them: in each tree, one node per level.

    >>> [squared_sensitivity(rounds, 4) for rounds in (1, 2, 3, 4, 5, 8)]
    [1, 2, 2, 3, 4, 6]
    >>> squared_sensitivity(8, 1)
    8
    """
    trees, rest = divmod(rounds, separation)
    return trees * separation.bit_length() + rest.bit_length()


def with_noise(values: "Tensor", std: float, rng: np.random.Generator) -> "Tensor":
    """Values plus independent Gaussian noise, drawn in double precision."""
    import torch

    noise = torch.from_numpy(std * rng.standard_normal(tuple(values.shape)))
    return values + noise.to(values.device, values.dtype)
