r"""What a run costs: the epsilon of every client after any number of rounds.

Neighbouring federations differ in whether one client sends its updates or zeros (add or remove one
client; numbers, sizes, weights and probabilities of clients are public). In a round, client i takes
part with probability :math:`p_i` and then moves the sum by at most :math:`\Delta_i`, against noise
of standard deviation :math:`\sigma`: its own noise multiplier is :math:`z_i = \sigma / \Delta_i`.

======================  ===========================================================================
sampling                how its rounds are composed
======================  ===========================================================================
independent (Poisson)   privacy loss distribution of the Poisson-subsampled Gaussian, with p_i, z_i
uniform, b of n         Renyi divergence of the Gaussian on a sample without replacement, with b/n
                        and :math:`\sigma / (\Delta_i + \max_j \Delta_j)`; without sampling if less
any other, or full      one Gaussian with :math:`z_i / \sqrt{\text{rounds}}`, exactly
======================  ===========================================================================

Uniform sampling needs more than the sensitivity of one client: if client i is not drawn, another
one is drawn in its place, and the sum moves by what both send.

All figures are from dp_accounting (the extra ``privacy``) and are upper bounds.

References: Balle and Wang 2018 (the Gaussian mechanism, exactly); Koskela et al. 2020, Doroshenko
et al. 2022 (privacy loss distributions); Wang, Balle and Kasiviswanathan 2019, theorem 27 (sampling
without replacement).
"""

import functools
import heapq
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, count
from fedshuffle.errors import FedShuffleError, optional_import
from fedshuffle.privacy.adaptive import sum_noise
from fedshuffle.privacy.noise import squared_sensitivity

Amplification = Literal["poisson", "uniform", "none"]

MAX_ROUNDS = 10_000_000
"""Largest number of rounds that :meth:`Budget.affordable` gives."""
_MAX_CLASSES = 256
"""Largest number of different (probability, contribution) to compute an epsilon for."""
_TOLERANCE = 0.005
"""How much larger than exact a probability or contribution of the worst client may be taken."""
_MIN_NOISE = 0.3
"""Below this noise multiplier, sampling is not counted: the figure has no meaning either way."""
_ORDERS = (*range(2, 33), 40, 48, 64, 80, 96, 128, 192, 256, 512, 1024)
"""Orders of the Renyi divergence."""


@dataclass(frozen=True, eq=False)
class Budget:
    """The epsilon that rounds cost, per client and for the worst client.

    >>> one = Budget(delta=1e-5, noise=4.0, contributions=np.ones(1), probabilities=np.ones(1))
    >>> round(one.spent(1), 4), round(one.spent(16), 4)
    (0.9263, 4.3772)
    """

    delta: float
    noise: float
    """The noise multiplier z of a round, for a client with the largest contribution."""
    contributions: FloatArray
    """For every client, the largest norm of what it adds to the sum, relative to the sensitivity:
    the largest is 1."""
    probabilities: FloatArray
    """For every client, the probability that it takes part in a round."""
    amplification: Amplification = "none"
    """By which sampling privacy is amplified."""
    count_noise: float = math.inf
    """Standard deviation of the noise on the count of adaptive clipping; infinite without it."""
    min_separation: int = 1
    """The fewest rounds between two participations of a client, and the rounds of a noise tree."""
    epsilon: float | None = None
    """What may be spent."""

    def spent(self, rounds: int) -> float:
        """The epsilon of the worst client after this number of rounds."""
        # Epsilon grows with the probability and with the contribution. Along the clients that no
        # other exceeds in both, one falls as the other rises, so the ends of a range bound it. The
        # range with the largest bound is split until it is one class, or hardly wider.
        p, contributions = self._worst

        def bound(first: int, last: int) -> tuple[float, int, int]:
            return -self._epsilon(rounds, p[last], contributions[first]), first, last

        ranges = [bound(0, len(p) - 1)]
        while True:
            epsilon, first, last = heapq.heappop(ranges)
            wide = max(p[last] / p[first], contributions[first] / contributions[last])
            if wide <= 1 + _TOLERANCE:
                return -epsilon
            middle = (first + last) // 2
            heapq.heappush(ranges, bound(first, middle))
            heapq.heappush(ranges, bound(middle + 1, last))

    def per_client(self, rounds: int) -> FloatArray:
        """The epsilon of every client after this number of rounds.

        If there are more than 256 different pairs of probability and contribution, both are rounded
        up, by 1% or more, and so is epsilon.
        """
        p, contributions, client_class = self._classes(_MAX_CLASSES)
        each = map(functools.partial(self._epsilon, rounds), p.tolist(), contributions.tolist())
        return np.array(list(each))[client_class]

    def affordable(self, epsilon: float | None = None) -> int:
        """The largest number of rounds within an epsilon, by default the one that may be spent."""
        limit = self.epsilon if epsilon is None else epsilon
        if limit is None:
            raise FedShuffleError("no epsilon limits the rounds of this run. Give one.")
        low, high = 0, 1
        while high < MAX_ROUNDS and self.spent(high) <= limit:
            low, high = high, min(2 * high, MAX_ROUNDS)
        if self.spent(high) <= limit:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.spent(middle) <= limit else (low, middle)
        return low

    def _epsilon(self, rounds: int, p: float, contribution: float) -> float:
        """The epsilon of a client with this probability and contribution."""
        if count(rounds, "the number of rounds", least=0) == 0:
            return 0.0
        # What the client moves, in standard deviations of the noise: the sum and the count, alone
        # and together with a client that is drawn in its place.
        updates = sum_noise(self.noise, self.count_noise)
        alone = math.hypot(contribution / updates, 0.5 / self.count_noise)
        in_place = math.hypot((contribution + 1.0) / updates, 1.0 / self.count_noise)
        over_rounds = math.sqrt(squared_sensitivity(rounds, self.min_separation))
        without_sampling = gaussian_epsilon(1 / (alone * over_rounds), self.delta)
        if self.amplification == "none" or p == 1 or 1 / alone < _MIN_NOISE:
            return without_sampling
        if self.amplification == "poisson":
            sampled = poisson_epsilon(p, 1 / alone, rounds, self.delta)
        else:
            sampled = uniform_epsilon(p, 1 / in_place, rounds, self.delta)
        return min(sampled, without_sampling)

    @functools.cached_property
    def _worst(self) -> tuple[list[float], list[float]]:
        """The clients that no other exceeds in both probability and contribution: probabilities,
        rising, and contributions, falling.
        """
        p, contributions, _ = self._classes(len(self.contributions))
        order = np.lexsort((-p, -contributions))
        largest = np.maximum.accumulate(p[order])
        order = order[np.concatenate([[True], p[order][1:] > largest[:-1]])]
        return p[order].tolist(), contributions[order].tolist()

    def _classes(self, limit: int) -> "tuple[FloatArray, FloatArray, IntArray]":
        """Clients that are equal, together: the probability and contribution of each class, and
        the class of each client. If there are more classes than the limit, numbers are rounded up
        until there are not.
        """
        p = self.probabilities if self.amplification != "none" else np.ones_like(self.probabilities)
        # Equal weights over equal probabilities differ in their last digits.
        exact = p, np.ceil(self.contributions * 1e9) / 1e9
        step, (p, contributions) = 0.01, exact
        while True:
            pairs, client_class = np.unique(p + 1j * contributions, return_inverse=True)
            if len(pairs) <= limit:
                return pairs.real, pairs.imag, client_class
            p, contributions = (
                np.minimum(np.exp(step * np.ceil(np.log(one) / step - 1e-9)), 1.0) for one in exact
            )
            step *= 1.5


# Epsilon of one client ---------------------------------------------------------------------------


def gaussian_epsilon(noise: float, delta: float) -> float:
    """Epsilon of the Gaussian mechanism with a noise multiplier, exactly."""
    return float(_library().get_epsilon_gaussian(noise, delta))


def poisson_epsilon(p: float, noise: float, rounds: int, delta: float) -> float:
    """Epsilon of rounds of the Gaussian mechanism, in which a client is with probability p.

    >>> round(poisson_epsilon(0.01, 1.0, 1000, 1e-6), 2)
    2.13
    """
    return float(_poisson_round(p, noise).self_compose(rounds).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=64)
def _poisson_round(p: float, noise: float) -> Any:
    """The privacy loss distribution of one round. Its grid is fine enough for the losses of a
    client that is rarely drawn, and coarse enough for about 200,000 points.
    """
    grid = max(min(1e-3, p / (8 * noise)), (1 / noise + 12) / noise / 200_000)
    library = _library("pld.privacy_loss_distribution")
    return library.from_gaussian_mechanism(
        noise, sampling_prob=p, value_discretization_interval=grid
    )


def uniform_epsilon(fraction: float, noise: float, rounds: int, delta: float) -> float:
    """Epsilon of rounds of the Gaussian mechanism on a fixed number of clients, drawn uniformly.
    The noise multiplier is relative to what the *replacement* of one client moves.

    >>> round(uniform_epsilon(0.01, 2.0, 1000, 1e-6), 2)
    1.63
    """
    divergences = rounds * _uniform_round(fraction, noise)
    compute = _library("rdp.rdp_privacy_accountant").compute_epsilon
    return float(compute(_ORDERS, divergences, delta)[0])


@functools.lru_cache(maxsize=256)
def _uniform_round(fraction: float, noise: float) -> FloatArray:
    """The Renyi divergences of one round."""
    library, rdp = _library(), _library("rdp")
    accountant = rdp.RdpAccountant(_ORDERS, library.NeighboringRelation.REPLACE_ONE)
    sample, clients = fraction.as_integer_ratio()  # only their ratio counts
    gaussian = library.GaussianDpEvent(noise)
    accountant.compose(library.SampledWithoutReplacementDpEvent(clients, sample, gaussian))
    return np.asarray(accountant.rdp)


def calibrated(budget: Budget, rounds: int) -> Budget:
    """The budget with the smallest noise with which the rounds cost no more than its epsilon."""
    epsilon = budget.epsilon
    assert epsilon is not None
    count(rounds, "the number of rounds")
    over_rounds = math.sqrt(squared_sensitivity(rounds, budget.min_separation))
    enough = over_rounds * float(_library().get_sigma_gaussian(epsilon, budget.delta))
    enough *= 1 + 1e-9  # the search of the library ends on either side
    if budget.amplification == "none":
        sum_noise(enough, budget.count_noise)  # refuses what adaptive clipping cannot reach
        return replace(budget, noise=enough)
    enough = min(enough, 2 * budget.count_noise * (1 - 1e-6))

    def excess(log_noise: float) -> float:
        """The logarithm of what is spent, relative to what may be."""
        spent = replace(budget, noise=math.exp(log_noise)).spent(rounds)
        return math.log(max(spent / epsilon, 0.01))  # clients that are rarely drawn may spend 0

    high = math.log(enough)
    if excess(high) > 0:
        raise FedShuffleError(
            f"adaptive clipping with count_noise {budget.count_noise:g} spends more than epsilon ="
            f" {epsilon:g} on the count alone in {rounds} rounds. Raise count_noise or"
            " epsilon, or sample more clients per round."
        )
    low = high - 1
    while low > math.log(_MIN_NOISE) and excess(low) <= 0:
        low, high = low - 1, low
    if excess(low) > 0:
        from scipy.optimize import brentq  # a third of a second to import: only when needed

        high = min(high, brentq(excess, low, high, xtol=5e-4) + 1e-3)
    return replace(budget, noise=math.exp(high))


def _library(module: str = "") -> Any:
    name = f"dp_accounting.{module}" if module else "dp_accounting"
    return optional_import(name, "the accounting of privacy", "privacy")
