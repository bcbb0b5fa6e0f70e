"""The buffers of an asynchronous schedule as cohorts: a server step is a round."""

import functools

from fedshuffle._arrays import FloatArray, IntArray, frozen
from fedshuffle.errors import FedShuffleError
from fedshuffle.sampling.available import AmongAvailable
from fedshuffle.sampling.base import Sampling
from fedshuffle.sampling.uniform import Full
from fedshuffle.timing.events import Arrivals, Events
from fedshuffle.timing.rates import rate_shares
from fedshuffle.timing.schedule import Asynchronous
from fedshuffle.timing.staleness import mean_weights
from fedshuffle.timing.tasks import Tasks
from fedshuffle.transforms import Chain


def buffers(schedule: Asynchronous, sampling: Sampling, tasks: Tasks) -> "Buffers":
    """The buffers of a schedule, which leaves nothing to a sampling."""
    if isinstance(sampling, Full):
        return Buffers(schedule, tasks)
    what = (
        "availability: leave it out, or use schedule 'wait'"
        if isinstance(sampling, AmongAvailable)
        else f"sampling {sampling!r}, as the schedule itself says who starts: leave the sampling"
        " out (or make it 'full'), and give the number of clients at a time, as in"
        " 'fedbuff:K=10,C=100'"
    )
    raise _refused(schedule, what)


def _refused(schedule: Asynchronous, what: str) -> FedShuffleError:
    return FedShuffleError(f"asynchronous schedule {str(schedule)!r} does not go with {what}.")


class Buffers(Sampling):
    """The updates that arrive for each server step, a client perhaps more than once.

    Here ``p`` is the expected number of updates of each client in a server step, which may exceed
    1: the size of the buffer times the client's share of all arrivals.

        >>> import numpy as np
        >>> from fedshuffle import LocalWork
        >>> from fedshuffle.timing import Clock, Tasks
        >>> tasks = Tasks(Clock([1.0, 3.0]), LocalWork().on(np.ones(2, dtype=int)))
        >>> buffers = Buffers(Asynchronous(buffer=2), tasks)
        >>> buffers.p.tolist(), buffers.draw(seed=0, round=0).tolist()
        ([1.5, 0.5], [0, 0])
    """

    distinct = False
    independent_rounds = False

    def __init__(self, schedule: Asynchronous, tasks: Tasks) -> None:
        self.schedule, self.tasks = schedule, tasks
        self.p = frozen(schedule.buffer * rate_shares(schedule, tasks))

    def __repr__(self) -> str:
        return f"{self.schedule}, {self.tasks.clock!r}"

    def check(self, chain: Chain, private: bool, down_channel: bool = False) -> None:
        """Refuse what cannot happen to updates of clients that start at their own times."""
        refused = {
            "privacy, which is accounted by rounds: use schedule 'wait'": private,
            "a down channel, which goes by what clients received last: leave it out": down_channel,
            "transforms that remember a client's earlier updates: use a channel without memory,"
            " such as 'qsgd:8' or 'topk:0.1'": chain.keeps_state,
        }
        for what, true in refused.items():
            if true:
                raise _refused(self.schedule, what)

    def arrivals(self, seed: int, step: int) -> Arrivals:
        """Who arrives for a server step, when, and from which models they started."""
        return self._events(seed).arrivals(step)

    @functools.lru_cache(maxsize=4)  # noqa: B019  # a seed's steps are made one after another
    def _events(self, seed: int) -> Events:
        return Events(self.schedule, len(self), seed, functools.partial(self.tasks.draw, seed))

    def draw(self, seed: int, round: int) -> IntArray:
        return self.arrivals(seed, round).clients

    @functools.cached_property
    def staleness_weights(self) -> FloatArray | None:
        """The mean staleness weight of each client; None if no formula is known."""
        return mean_weights(self.schedule, self.tasks)

    def pair_probabilities(self) -> FloatArray:
        raise FedShuffleError(
            f"nobody knows how often two clients arrive together under schedule {self.schedule}:"
            " for theory, use schedule 'wait'."
        )
