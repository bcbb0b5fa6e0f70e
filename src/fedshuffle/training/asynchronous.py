r"""Asynchronous rounds: updates start from old models, and stale ones count less.

A round is a server step. Its cohort is the buffer, to which the method's own averaging applies; an
update that is :math:`\theta` steps old counts :math:`s(\theta) = (1 + \theta)^{-a}` times besides.
Methods that divide by inclusion probability divide by the expected number of a client's updates per
step, and here by the client's mean of s as well: so each counts as the objective says.
"""

from dataclasses import replace

import numpy as np

from fedshuffle import schedules
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.local_work import StepCounts, Workload
from fedshuffle.methods import Method
from fedshuffle.methods.round import StartGroup
from fedshuffle.sampling import Buffers
from fedshuffle.schedules import Schedule
from fedshuffle.state import State
from fedshuffle.timing.events import Arrivals


class AsynchronousRounds:
    """From which models the updates of a server step started, and how much each counts."""

    def __init__(self, buffers: Buffers, method: Method, workload: Workload, seed: int) -> None:
        self._buffers, self._workload, self._seed = buffers, workload, seed
        rule, n = method.averaging, len(buffers)
        means: FloatArray | None = np.ones(n)  # nothing to divide by
        if buffers.schedule.staleness and rule.by_probability:
            means = None if rule.estimate else buffers.staleness_weights
        self._means = _MeanSoFar(self, n) if means is None else means

    def arrivals(self, round: int) -> Arrivals:
        """The buffer of a server step."""
        return self._buffers.arrivals(self._seed, round)

    def weights(self, arrivals: Arrivals) -> FloatArray:
        """The staleness weight of each update."""
        return self._buffers.schedule.weight(arrivals.staleness)

    def steps(self, round: int) -> StepCounts:
        """The steps of each update's task."""
        found, planned = self.arrivals(round), np.empty((2, self._buffers.schedule.buffer), int)
        for address, places in _grouped(found.addresses):
            planned[:, places] = self._workload.plan(found.clients[places], self._seed, address)
        return StepCounts(*planned)

    def starts(self, state: State, step_size: Schedule) -> list[StartGroup]:
        """Those who started from the same model, with the step size of that time."""
        found = self.arrivals(state.round)
        models, groups = state.in_flight, []
        for address, places in _grouped(found.addresses):
            version = int(found.versions[places[0]])
            size = schedules.value(step_size, version, "step size")
            model = state.x if version == state.round else models[version]
            groups.append(StartGroup(places, model, address, size))
        return groups

    def factors(self, round: int) -> FloatArray:
        """What each update counts besides the weight that the method gives it."""
        found, means = self.arrivals(round), self._means
        if isinstance(means, _MeanSoFar):
            return self.weights(found) / means.before(round, found.clients)
        return np.asarray(self.weights(found) / means[found.clients])

    def after(self, state: State, after: State) -> State:
        """The next state: with the time, and the models that updates still to come started from."""
        found = self.arrivals(state.round)
        models = {**state.in_flight, state.round: state.x}
        for version in found.released:
            del models[version]
        metrics = {**after.metrics, "staleness": found.staleness.astype(np.float64)}
        return replace(after, time=found.time, in_flight=models, metrics=metrics)


def _grouped(addresses: IntArray) -> list[tuple[int, IntArray]]:
    """Each address, with its places."""
    return [(int(one), np.flatnonzero(addresses == one)) for one in np.unique(addresses)]


class _MeanSoFar:
    """The mean staleness weight of each client in the steps before, where no formula is known.

    All clients' mean counts as one more update, so that there is one to begin with. The steps
    before are made again when they are needed, so a resumed run has the same means.
    """

    def __init__(self, rounds: AsynchronousRounds, clients: int) -> None:
        self._rounds, self._n = rounds, clients
        self._restart()

    def _restart(self) -> None:
        self._round, self._sum, self._count = 0, np.zeros(self._n), np.zeros(self._n)
        self._total, self._updates = 0.0, 0

    def before(self, round: int, clients: IntArray) -> FloatArray:
        """The means of these clients over the steps before one."""
        if round < self._round:
            self._restart()
        for step in range(self._round, round):
            found = self._rounds.arrivals(step)
            weights = self._rounds.weights(found)
            np.add.at(self._sum, found.clients, weights)
            np.add.at(self._count, found.clients, 1)
            self._total, self._updates = self._total + weights.sum(), self._updates + len(weights)
        self._round = round
        mean = self._total / self._updates if self._updates else 1.0
        return np.asarray((mean + self._sum[clients]) / (1 + self._count[clients]))
