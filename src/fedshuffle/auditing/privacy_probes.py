"""Probes of a private server: how far one client moves the model, the noise, and the threshold.

Client j of a cohort sends its update along coordinate j; the other coordinates show nothing but
noise. Noise hides what one client does, as it should. But where a server draws it from the global
generators, or from one of its own that starts again with the server, two servers can be made to
draw the same noise. Sent the opposite updates, they clip alike, so half the difference of their
steps is what clients did, exactly. Elsewhere the audit averages.
"""

import contextlib
import random
import sys
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.adapters import Aggregator, Replies
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.federation import Federation
from fedshuffle.sampling import Sampling
from fedshuffle.sampling.base import check_cohort

LONG = 2.0**10  # the length of a long update, in clipping norms
_NOTHING = 2.0**-40  # the length of an update of "zero": some servers divide by it
_SHORT = 2.0**-3  # the length of an update that is not clipped
_NOISE = 1 << 14  # coordinates that show noise alone, to measure it
_SPARE = 16  # the same for other probes
_NUMBERS = 1 << 23  # most numbers that are sent in one round
_COHORTS = 16  # cohorts that are probed
_CLIENTS = 2000  # most clients of a cohort
_PAIRS = 4  # of rounds that show the noise
_SURE = 5.0  # standard errors needed to see a difference
_ADAPTS = 1e-4  # the logarithm of the smallest factor by which a threshold adapts
_SAME = 1e-6  # relative differences up to this are rounding
_REACTIONS = 8  # measurements of how an adaptive threshold reacts, averaged

Estimate = tuple[FloatArray, FloatArray]  # numbers, and their standard errors: zero if exact


@dataclass(frozen=True, eq=False)
class Probe:
    """A cohort, and the updates that its clients send."""

    clients: IntArray
    updates: FloatArray

    def without(self, row: int) -> "Probe":
        """The same messages, but for one that never arrives."""
        return Probe(np.delete(self.clients, row), np.delete(self.updates, row, axis=0))

    def changed(self, row: int, update: FloatArray) -> "Probe":
        """The same messages, but for one."""
        updates = self.updates.copy()
        updates[row] = update
        return Probe(self.clients, updates)


@dataclass(eq=False)
class PrivateServer:
    """A server that says it is private, and what probes show of it."""

    aggregator: Aggregator
    federation: Federation
    sampling: Sampling
    clip: float
    rounds: int  # in which an adaptive threshold is followed
    repeats: int  # measurements that are averaged where noise does not cancel
    seed: int

    def cohorts(self) -> list[IntArray]:
        """All cohorts if they are few, or else some that are drawn."""
        listed = self.sampling.cohorts(_COHORTS)
        if listed is not None and len(listed) <= _COHORTS:
            members = [members for members, _ in listed]
        else:
            n, draw = len(self.federation), self.sampling.draw
            draws = (draw(self.seed, r) for r in range(_COHORTS))
            members = [check_cohort(drawn, n, self.sampling) for drawn in draws]
        found = [clients for clients in members if len(clients)]
        if not found:
            raise FedShuffleError(
                f"no client took part in {_COHORTS} draws: use larger probabilities."
            )
        if max(map(len, found)) > _CLIENTS:
            raise FedShuffleError(
                f"a cohort has {max(map(len, found))} clients: a privacy audit probes at most"
                f" {_CLIENTS}. Give fewer clients, or a sampling of fewer."
            )
        return found

    def each(self, clients: IntArray, length: float, spare: int = _SPARE) -> Probe:
        """Every client sends an update of this length, in clipping norms, on its coordinate."""
        b = len(clients)
        spare = min(spare, max(_NUMBERS // b - b, _SPARE))
        return Probe(clients, self.clip * length * np.eye(b, b + spare))

    def nothing(self, clients: IntArray) -> Probe:
        """No client moves."""
        return self.each(clients, _NOTHING)

    def step(self, probe: Probe, noise: int, *, fresh: bool = True, round: int = 0) -> FloatArray:
        """The server's step; the same ``noise`` seeds the global generators alike."""
        if fresh:
            self.aggregator.reset()
        clients, name = probe.clients.copy(), self.aggregator.name
        replies = Replies(
            round,
            clients,
            self.federation.sizes[clients],
            np.ones(len(clients), dtype=np.int64),
            self.sampling.p[clients],
            probe.updates.copy(),
        )
        seed = (self.seed * 1_000_003 + 7919 * noise + round) % 2**32
        with error_context(f"{name} failed"), seeded(seed), np.errstate(all="ignore"):
            step = self.aggregator.step(replies)
        dimensions = probe.updates.shape[1]
        if np.shape(step) != (dimensions,) or not np.isfinite(step).all():
            raise FedShuffleError(
                f"{name} gives a step of shape {np.shape(step)}, or NaN, for updates of shape"
                f" {probe.updates.shape}: give one finite number per column, ({dimensions},)."
            )
        return step

    def moved(self, probe: Probe) -> Estimate:
        """How far the clients move the model on each of their coordinates, in the mean."""
        return self._repeat([probe], self.repeats)

    def response(self, clients: IntArray, length: float) -> Estimate:
        """How far each client moves the model by an update of this length."""
        return self.moved(self.each(clients, length))

    def sensitivity(self, clients: IntArray, most: int) -> dict[str, tuple[float, float] | None]:
        """How far one client can move the model, with the standard error, by what it changes.
        All others send long updates in the opposite direction.
        """
        probe = self.each(clients, 0.0)
        probe.updates[:, most] = -LONG * self.clip
        opposite, nothing = probe.updates[most].copy(), np.zeros_like(probe.updates[most])
        nothing[most] = _NOTHING * self.clip
        full = probe.changed(most, -opposite)
        neighbours: dict[str, Probe | None] = {
            "zero-out": probe.changed(most, nothing),
            "remove": probe.without(most) if len(clients) > 1 else None,
            "replace": probe,
        }
        found: dict[str, tuple[float, float] | None] = {}
        for name, other in neighbours.items():
            found[name] = None
            if other is not None and self.step(other, 0).any():  # else it refuses such a round
                (one, error), (another, its_error) = self.moved(full), self.moved(other)
                distance, error = one[most] - another[most], np.hypot(error, its_error)[most]
                found[name] = abs(float(distance)), float(error)
        return found

    def noise(self, clients: IntArray, pairs: int = _PAIRS, first: int = 0) -> tuple[float, int]:
        """The standard deviation of the noise on one coordinate while all clients send long
        updates, and its degrees of freedom: from differences of two rounds.
        """
        probe, b = self.each(clients, LONG, _NOISE), len(clients)
        found: list[FloatArray] = []
        for pair in range(pairs):
            noise = 1000 + 2 * (first + pair)
            one, other = self.step(probe, noise)[b:], self.step(probe, noise + 1)[b:]
            if _same(one, other):
                return self._own_noise(clients)
            found.append(one - other)
        all = np.concatenate(found)
        return float(np.sqrt(np.mean(all**2) / 2)), len(all)

    def _own_noise(self, clients: IntArray) -> tuple[float, int]:
        """The same for a generator of the server's own, which starts again with it: from one round,
        as the next may have another threshold. Noise that the next round repeats is none.
        """
        probe, b = self.each(clients, LONG, _PAIRS * _NOISE), len(clients)
        one, other = self.step(probe, 0)[b:], self.step(probe, 0, fresh=False, round=1)[b:]
        return 0.0 if _same(one, other) else float(np.sqrt(np.mean(one**2))), len(one)

    def reaction(self, clients: IntArray, most: int) -> tuple[Estimate, Estimate]:
        """By how much the logarithm of the threshold changes after a round in which every update
        is clipped, and after one in which none is, as client ``most`` shows it.
        """
        long, nothing = self.each(clients, LONG), self.nothing(clients)
        rounds = ([long], [long, long], [nothing, long])
        (before, error), *after = (self._repeat(r, _REACTIONS, exact=False) for r in rounds)
        with np.errstate(divide="ignore", invalid="ignore"):
            clipped, none = (
                (
                    np.log(np.abs(now / before))[most],
                    np.hypot(now_error / now, error / before)[most],
                )
                for now, now_error in after
            )
        return clipped, none

    def thresholds(self, clients: IntArray, norms: FloatArray, most: int) -> FloatArray:
        """How far client ``most`` moves the model in each round, if clients send updates of these
        norms in every round: proportional to the threshold if its own updates are clipped.
        """
        updates = norms[:, None] / self.clip * self.each(clients, 1.0).updates
        probes = [Probe(clients, updates)] * self.rounds
        repeats = 1 if self._repeatable(probes[0]) else max(self.repeats // 10, 1)
        found = [self._mirrored(probes, noise, range(self.rounds)) for noise in range(repeats)]
        mean: FloatArray = np.mean(found, axis=0)[:, most]
        return mean

    def _repeat(self, probes: list[Probe], repeats: int, exact: bool = True) -> Estimate:
        """The mean movement in the last of some rounds, on the clients' coordinates."""
        last, found = [len(probes) - 1], []
        repeats = self.repeats if not self._repeatable(probes[0]) else repeats
        for noise in range(repeats):
            found.append(self._mirrored(probes, noise, last)[-1])
            if exact and noise == 1 and _same(*found):  # the noise cancels
                return found[0], np.zeros_like(found[0])
        return np.mean(found, axis=0), np.std(found, axis=0, ddof=1) / np.sqrt(len(found))

    def _repeatable(self, probe: Probe) -> bool:
        return _same(self.step(probe, 0), self.step(probe, 0))

    def _mirrored(self, probes: list[Probe], noise: int, rounds: Collection[int]) -> FloatArray:
        """Half the difference between two servers for which the updates of some rounds have
        opposite signs. Norms are the same, so clipping and noise are: the noise cancels.
        """
        columns = probes[0].updates.shape[1] - _SPARE
        both = np.zeros((2, len(probes), columns))
        for sign, steps in zip((1.0, -1.0), both, strict=True):
            for t, probe in enumerate(probes):
                sent = Probe(probe.clients, (sign if t in rounds else 1.0) * probe.updates)
                steps[t] = self.step(sent, 5000 + noise, fresh=t == 0, round=t)[:columns]
        half: FloatArray = (both[0] - both[1]) / 2
        return half


@dataclass(frozen=True, eq=False)
class AdaptiveThreshold:
    """An adaptive clipping threshold, followed while clients send updates of constant norms.

    Andrew et al. (2021), https://arxiv.org/abs/1905.03871: with the share b of updates within the
    threshold C, ``C <- C exp(-rate (b - quantile))``, so C settles at that quantile of the norms.
    """

    norms: FloatArray  # that the clients sent, one of them longer than any threshold
    values: FloatArray  # the threshold of every round
    unclipped: FloatArray  # the share of updates within the threshold, in every round
    after_clipping: float  # log of its factor after a round in which all updates were clipped
    after_none: float  # the same after a round in which none was

    @property
    def inverted(self) -> bool:
        """Whether clipping makes it fall, compared with a round in which none was clipped."""
        return self.after_clipping < self.after_none

    @property
    def runs_away(self) -> bool:
        """Whether it ended far from all norms."""
        norms = np.sort(self.norms)[:-1]
        return bool(self.values[-1] < norms[0] / 2 or self.values[-1] > 2 * norms[-1])


@dataclass(frozen=True, eq=False)
class Measured:
    """What probes show of a server, in the cohort that hides one client least."""

    cohort: IntArray
    client: Hashable  # the one that moves the model furthest
    weight: float  # its aggregation weight
    clip: float  # at which its updates are clipped; NaN if noise hides it
    noise: float  # standard deviation on each coordinate
    freedom: int  # degrees of freedom of this estimate
    changes: dict[str, tuple[float, float] | None]  # how far, and the standard error, by relation
    threshold: AdaptiveThreshold | None
    probed: int  # clients that were in a cohort


def measure(server: PrivateServer) -> Measured:
    """Find the cohort and the client that noise hides least, and measure there."""
    cohorts = server.cohorts()
    hidden = []
    for k, clients in enumerate(cohorts):
        furthest = np.abs(server.response(clients, LONG)[0]).max()
        hidden.append(server.noise(clients, 1, first=_PAIRS + k)[0] / max(furthest, 1e-300))
    clients = cohorts[int(np.argmin(hidden))]
    moved, errors = server.response(clients, LONG)
    most = int(np.argmax(np.abs(moved)))
    if not moved[most]:
        raise FedShuffleError(f"{server.aggregator.name} ignores all updates: nothing to hide.")
    noise, freedom = server.noise(clients)
    longer = np.abs(server.response(clients, 2 * LONG)[0][most])
    bounded = longer <= 1.5 * np.abs(moved[most]) + _SURE * errors[most]
    changes = server.sensitivity(clients, most)
    if not bounded:
        changes = {name: pair and (np.inf, 0.0) for name, pair in changes.items()}
    weight, clip = float(moved[most]) / server.clip, np.nan
    if not errors[most]:  # else noise hides a short update, and the claimed norm has to do
        weight = float(server.response(clients, _SHORT)[0][most]) / (_SHORT * server.clip)
        clip = float(moved[most]) / weight if bounded else np.inf
    return Measured(
        cohort=clients,
        client=server.federation.ids[clients[most]],
        weight=weight,
        clip=clip,
        noise=noise,
        freedom=freedom,
        changes=changes,
        threshold=_threshold(server, clients, most, weight) if bounded else None,
        probed=len(np.unique(np.concatenate(cohorts))),
    )


def _threshold(
    server: PrivateServer, clients: IntArray, most: int, weight: float
) -> AdaptiveThreshold | None:
    """The dynamics of the threshold; None if it does not depend on the updates."""
    if len(clients) < 2:
        return None
    (rises, up), (falls, down) = server.reaction(clients, most)
    if not np.abs(rises - falls) > _SURE * np.hypot(up, down) + _ADAPTS:
        return None
    # It starts below all norms, so that it has to rise. One update is always clipped, to show it.
    norms = np.insert(server.clip * np.exp(np.linspace(0, 2, len(clients) - 1)), most, 0.0)
    norms[most] = server.clip * LONG**2
    values = server.thresholds(clients, norms, most) / weight
    unclipped = (norms <= values[:, None] * (1 + _SAME)).mean(axis=1)
    return AdaptiveThreshold(norms, values, unclipped, float(rises), float(falls))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, which other people's servers use, and restore them after."""
    torch = sys.modules.get("torch")
    before = random.getstate(), np.random.get_state()
    torch_state = None if torch is None else torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    if torch is not None:
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch is not None:
            torch.set_rng_state(torch_state)


def _same(one: FloatArray, other: FloatArray) -> bool:
    return bool(np.abs(one - other).max() <= _SAME * max(np.abs(one).max(), np.abs(other).max()))
