r"""How often clients arrive under an asynchronous schedule.

With mean times :math:`\theta_i` of a task, the shares of the arrivals in a long run are

- looping clients: proportional to :math:`1 / \theta_i`, whatever the distribution of the times
  (the renewal theorem);
- drawn among the idle, C at a time: proportional to :math:`e_{C-1}(\theta_{-i})`, the elementary
  symmetric polynomial of the other clients' times. The set B of busy clients has the probability
  :math:`\prod_{i \in B} \theta_i / e_C(\theta)`: if times are exponential, client j takes the place
  of i at the rate :math:`\theta_i^{-1} / (n - C + 1)`, so the chain is reversible. Client i arrives
  at the rate :math:`P(i \in B) / \theta_i`. By partial balance only the means of the times matter,
  not their distributions; several clients may arrive at one instant;
- drawn among all, with queues, or in random order: all alike, as in every closed queue.
"""

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.timing.schedule import Asynchronous
from fedshuffle.timing.tasks import Tasks

_HALVINGS = 60


def rate_shares(schedule: Asynchronous, tasks: Tasks) -> FloatArray:
    """The share of each client in all arrivals, in a long run.

    >>> from fedshuffle import LocalWork
    >>> from fedshuffle.timing import Clock
    >>> tasks = Tasks(Clock([1.0, 1.0, 2.0]), LocalWork().on(np.ones(3, dtype=int)))
    >>> rate_shares(Asynchronous(), tasks).tolist()
    [0.4, 0.4, 0.2]
    >>> rate_shares(Asynchronous(concurrency=2), tasks).round(3).tolist()
    [0.375, 0.375, 0.25]
    """
    n = len(tasks)
    at_a_time = schedule.at_a_time(n)
    if schedule.draw != "idle":
        return np.full(n, 1 / n)
    rates = 1 / tasks.mean if at_a_time == n else among_idle(tasks.mean, at_a_time)
    rates = rates / rates.max()  # equal ones become 1, so that shares of n are exactly 1 / n
    return np.asarray(rates / rates.sum())


def among_idle(theta: FloatArray, at_a_time: int) -> FloatArray:
    r""":math:`e_{C-1}(\theta_{-i})` for every client, up to a common factor.

    Independent choices with odds :math:`z \theta_i`, given that their number N is C, are the busy
    set, for every z. So :math:`e_{C-1}(\theta_{-i})` is proportional to
    :math:`P(N_{-i} = C - 1) / (1 + z \theta_i)`, and z is such that about C are expected.
    """
    from fedshuffle.sampling.poisson_binomial import PoissonBinomial  # samplings know of time

    if at_a_time == 1:
        return np.ones(len(theta))
    theta = theta / np.exp(np.log(theta).mean())
    low, high = np.log(1e-9 / theta.max()), np.log(1e9 * len(theta) / theta.min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        odds = np.exp(middle) * theta
        low, high = (low, middle) if (odds / (1 + odds)).sum() > at_a_time else (middle, high)
    rest = PoissonBinomial(odds / (1 + odds)).without_one(lambda m: 1.0 * (m == at_a_time - 1))
    return np.asarray(rest / (1 + odds))
