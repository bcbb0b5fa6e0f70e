r"""What is proven of clients that are reshuffled, with the sampling ``reshuffled:B``."""

import numpy as np

from fedshuffle._arrays import FloatArray, count, expect, number
from fedshuffle.errors import FedShuffleError
from fedshuffle.sampling import Reshuffled
from fedshuffle.theory.constants import ProblemConstants


def reshuffled_bound(
    problem: ProblemConstants,
    sampling: Reshuffled,
    *,
    steps: int,
    step_size: float,
    start: float,
    meta_epochs: int,
    epochs: int = 1,
) -> FloatArray:
    r"""Bounds of :math:`E\|x - x^*\|^2` after 0, 1, ... meta-epochs of T rounds.

    Clients are alike: of equal weight, with the same number of minibatches, which are reshuffled in
    every epoch; B divides the number of clients n. Then with :math:`\tau` local steps,
    :math:`\rho = 1 - \gamma\mu` and :math:`\gamma \le 1/L`,

    .. math:: D_{e+1} \le \rho^{T\tau} D_e
              + \gamma^3 L \sum_{r,i} \rho^{(T - r)\tau - 1 - i}\, V_{ri},

    where :math:`V_{ri}` is the mean square of the sum of gradients at the optimum up to step i of
    round r. What is left in the end goes with :math:`\gamma^2`; with independent cohorts it goes
    with :math:`\gamma`. docs/research/proofs.md has the proof.

    Reference: Malinovsky, Horvath, Burlachenko and Richtarik, Federated Learning with Regularized
    Client Participation, 2023.

    Args:
        problem: its constants, with ``mu > 0``, for equal weights.
        sampling: the reshuffled clients.
        steps: the number of minibatches of a client.
        step_size: the local step size; the server's is 1.
        start: the squared distance from the optimum at first.
        meta_epochs: how many.
        epochs: local epochs per round.

    >>> from fedshuffle.theory import quadratic_constants
    >>> problem = quadratic_constants(1.0, [[0.0], [1.0], [2.0], [3.0]]).problem
    >>> settings = {"steps": 1, "start": 1.0, "meta_epochs": 1000}
    >>> for step_size in (0.1, 0.05):
    ...     bound = reshuffled_bound(problem, Reshuffled(4, 2), step_size=step_size, **settings)
    ...     print(f"{bound[-1]:.5f}")
    0.00219
    0.00053
    """
    expect(problem, ProblemConstants, "problem")
    expect(sampling, Reshuffled, "sampling")
    n, b, rounds = len(sampling), sampling.b, sampling.period
    local = count(steps, "steps") * count(epochs, "epochs")
    number(step_size, "step_size", "(0, inf)")
    if n % b:
        raise FedShuffleError(
            f"the bound is for cohorts of equal size: take a B that divides {n}, not {b}."
        )
    if not problem.mu > 0:
        raise FedShuffleError("the bound is for strongly convex losses: give mu, such as l2.")
    if step_size * problem.L > 1:
        raise FedShuffleError(f"the bound holds for step sizes up to 1 / L = {1 / problem.L:g}.")
    between = problem.G**2  # mean square of the clients' gradients at the optimum
    within = np.mean(problem.per_client("sigma", n) ** 2)  # and of the minibatches' around these
    within += (problem.per_client("P", n) ** 2).max() * between
    r, i = np.arange(rounds)[:, None], np.arange(local)
    others = max(n - 1, 1)
    before = local * r * (local * (n - r * b) / b - 2 * i) / others  # clients of earlier rounds
    inside = (i % steps) * (steps - i % steps) / max(steps - 1, 1)
    keep = 1 - step_size * problem.mu
    noise = (before + i**2) * between + inside * within
    added = step_size**3 * problem.L * float(keep ** np.arange(noise.size)[::-1] @ noise.ravel())
    distances = [number(start, "start", "[0, inf)")]
    for _ in range(count(meta_epochs, "meta_epochs")):
        distances.append(keep**noise.size * distances[-1] + added)
    return np.array(distances)
