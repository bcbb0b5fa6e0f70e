"""Exact expectations over many rounds: quadratics, every cohort, every order of the examples.

A round is a random affine map of the state, the same in distribution every round, so the mean of
``z z'`` with ``z = (state, 1)`` follows a linear recursion: ``E[T (x) T]``. Written in numpy from
the algorithms, without the library's training code.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedshuffle import Federation, FedShuffleGen
from fedshuffle.methods import Cohort
from fedshuffle.sampling import Sampling
from fedshuffle.theory import ExactConstants, quadratic_constants
from tests import brute

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Losses:
    """Client i has the losses ``1/2 (x - m)' A (x - m)``, one for each of its examples."""

    hessians: list[Floats]
    optima: list[Floats]

    @classmethod
    def drawn(cls, sizes: Sequence[int], seed: int, *, alike: bool = False) -> "Losses":
        """``alike``: all examples of a client have one Hessian, so that P = 0."""
        rng = np.random.default_rng(seed)
        hessians, optima = [], []
        for m in sizes:
            a = rng.normal(size=(m, 2, 3))
            full = np.einsum("jab,jcb->jac", a, a) / 3 + 0.2 * np.eye(2)
            hessians.append(np.broadcast_to(full.mean(0), full.shape).copy() if alike else full)
            optima.append(rng.normal(size=2) + 0.5 * rng.normal(size=(m, 2)))
        return cls(hessians, optima)

    @property
    def sizes(self) -> list[int]:
        return [len(points) for points in self.optima]

    def constants(self, w_hat: Floats, **options: object) -> ExactConstants:
        return quadratic_constants(
            np.concatenate(self.hessians),
            np.concatenate(self.optima),
            sizes=self.sizes,
            w_hat=w_hat,
            **options,  # type: ignore[arg-type]
        )

    def hessian(self, w: Floats) -> Floats:
        return np.asarray(sum(v * a.mean(0) for v, a in zip(w, self.hessians)))

    def affine(self, i: int, j: int) -> Floats:
        """The gradient of an example as a matrix for (x, 1)."""
        a = self.hessians[i][j]
        return np.column_stack([a, -a @ self.optima[i][j]])


@dataclass(frozen=True)
class Curves:
    """Exact expectations after 0, 1, ... rounds."""

    distance: Floats
    gap: Floats
    gradient: Floats


def expected_rounds(
    losses: Losses,
    rule: FedShuffleGen,
    federation: Federation,
    sampling: Sampling,
    epochs: Sequence[int],
    step_size: float,
    server_step_size: float,
    w_hat: Floats,
    rounds: int,
    start: Floats,
) -> Curves:
    """What a method without momentum does."""
    tau = federation.sizes * np.array(epochs)
    everyone = _cohort(federation, sampling, tau, np.arange(len(tau)))
    gammas = step_size * rule.step_scale(everyone)
    updates = [_updates(losses, i, epochs[i], gammas[i]) for i in range(len(tau))]
    means = [maps.mean(0) for maps in updates]
    seconds = [np.mean([np.kron(c, c) for c in maps], axis=0) for maps in updates]
    one = np.eye(3)
    lifted = np.zeros((9, 9))
    for cohort, probability in brute.cohorts(sampling):
        members = np.array(cohort, dtype=int)
        mean, extra = one.copy(), np.zeros((9, 9))
        if len(members):
            weights = rule.aggregation_weights(_cohort(federation, sampling, tau, members))
            for i, weight in zip(cohort, server_step_size * weights):
                mean += weight * (means[i] - one)
                extra += weight**2 * (seconds[i] - np.kron(means[i], means[i]))
        lifted += probability * (np.kron(mean, mean) + extra)

    a, best = losses.hessian(w_hat), losses.constants(w_hat, form="convex").x_star
    away = np.column_stack([np.eye(2), -best])
    z = np.append(start, 1.0)
    moment = np.kron(z, z)
    rows = []
    for _ in range(rounds + 1):
        second = away @ moment.reshape(3, 3) @ away.T
        rows.append([np.trace(second), np.trace(a @ second) / 2, np.trace(a @ a @ second)])
        moment = lifted @ moment
    return Curves(*np.array(rows).T)


def with_mvr(
    losses: Losses,
    w: Floats,
    epochs: int,
    eta_l: float,
    a: float,
    rounds: int,
    start: Floats,
) -> Floats:
    """The mean of ``E |grad f|^2`` over the starts of the epochs, in each round of FedShuffleMVR.

    One client per round, with probability w; the state is (x, the x before, m, 1).
    """
    hessian = losses.hessian(w)
    best = losses.constants(w, form="convex").x_star
    x, before, m, one = np.eye(2, 7), np.eye(2, 7, 2), np.eye(2, 7, 4), np.eye(1, 7, 6)
    z = np.append(np.tile(start, 2), [0.0, 0.0, 1.0])
    moments = np.kron(z, z)
    found = []
    lifted: dict[bool, tuple[Floats, Floats]] = {}
    for first in (True, False):
        move, seen = np.zeros((49, 49)), np.zeros((7, 7))
        for i, weight in enumerate(w):
            k = losses.sizes[i]
            own = np.mean([losses.affine(i, j) for j in range(k)], axis=0)
            now, then = own @ np.vstack([x, one]), own @ np.vstack([before, one])
            renewed = now if first else a * now + (1 - a) * (m + now - then)
            orders = list(itertools.permutations(range(k)))
            plans = list(itertools.product(orders, repeat=epochs))
            for plan in plans:
                y = x.copy()
                for order in plan:
                    slope = hessian @ (y - best[:, None] * one)
                    seen += weight / len(plans) / epochs * slope.T @ slope
                    for j in order:
                        grad = losses.affine(i, j)
                        along = grad @ np.vstack([y, one]) - (1 - a) * grad @ np.vstack([x, one])
                        y = y - eta_l / k * (along + (1 - a) * renewed)
                after = np.vstack([y, x, renewed, one])
                move += weight / len(plans) * np.kron(after, after)
        lifted[first] = move, seen
    for r in range(rounds):
        move, seen = lifted[r == 0]
        found.append(float(np.sum(seen * moments.reshape(7, 7))))
        moments = move @ moments
    return np.array(found)


def _updates(losses: Losses, i: int, epochs: int, gamma: float) -> Floats:
    """A client's local training as a map of (x, 1), for every order."""
    steps = []
    for j in range(losses.sizes[i]):
        step = np.eye(3)
        step[:2] -= gamma * losses.affine(i, j)
        steps.append(step)
    orders = list(itertools.permutations(range(losses.sizes[i])))
    maps = []
    for plan in itertools.product(orders, repeat=epochs):
        end = np.eye(3)
        for j in itertools.chain(*plan):
            end = steps[j] @ end
        maps.append(end)
    return np.array(maps)


def _cohort(
    federation: Federation, sampling: Sampling, tau: NDArray[np.int64], members: NDArray[np.int64]
) -> Cohort:
    return Cohort(
        members,
        federation.weights[members],
        sampling.p[members],
        tau[members],
        tau[members],
        int(tau.max()),
    )
