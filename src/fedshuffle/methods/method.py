"""A method: an averaging rule, a direction, a server optimiser, and the local work it fixes."""

import dataclasses
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedshuffle._arrays import expect
from fedshuffle.errors import FedShuffleError, check_known
from fedshuffle.kernel import Answer, Request
from fedshuffle.local_optimisers import LocalOptimiser
from fedshuffle.local_work import WHOLE_CLIENT, LocalWork, Workload
from fedshuffle.methods.averaging import Cohort, FedShuffleGen, InclusionProbability
from fedshuffle.methods.directions import MVR, Direction, GlobalMomentum, Plain
from fedshuffle.methods.options import replaced
from fedshuffle.methods.round import MethodRound, RoundSettings, empty_round, needs_every_update
from fedshuffle.methods.servers import Average, ServerOptimiser
from fedshuffle.probabilities import Estimate
from fedshuffle.probabilities import resolve as resolve_estimate
from fedshuffle.sampling import Buffers, Full, Sampling
from fedshuffle.state import State
from fedshuffle.timing import Timing

if TYPE_CHECKING:
    from fedshuffle.federation import Federation

_UNSET: Mapping[str, Any] = {field.name: field.default for field in dataclasses.fields(LocalWork)}
_MOMENTA: Mapping[type[Direction], str] = {MVR: "mvr", GlobalMomentum: "global"}


class Family(NamedTuple):
    """Methods that belong together and share a page of the documentation."""

    page: str
    title: str
    styles: Mapping[str, tuple[str, str]]
    """By the name of a method: its label and its colour in text and figures."""


@dataclass(frozen=True)
class Method:
    """A federated method over the one kernel.

    Args:
        name: what users call it by.
        summary: one line for a person.
        averaging: the rules (c, w-tilde, q).
        direction: which way clients step; along the gradient by default.
        server: what the server does with the aggregated update; adds it by default.
        work: the parts of the local work that the method fixes; other values are refused, except
            other options of the same local optimiser.
        balanced_only: defined only for full participation and equal numbers of local steps.
        pooled: there are no clients: one holds the data of all.
        reference: where it comes from.
        family: its page in the documentation, its label and its colour.

    >>> from fedshuffle import methods
    >>> methods.get("fedavg").describe()["step_normalisation"]
    'steps_of_the_longest'
    """

    name: str
    summary: str
    averaging: FedShuffleGen
    direction: Direction = field(default_factory=Plain)
    server: ServerOptimiser = field(default_factory=Average)
    work: Mapping[str, Any] = field(default_factory=dict)
    balanced_only: bool = False
    pooled: bool = False
    reference: str = ""
    family: Family | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        expect(self.name, str, "the name of a method")
        expect(self.averaging, FedShuffleGen, f"the averaging of {self.name}")
        expect(self.direction, Direction, f"the direction of {self.name}")
        expect(self.server, ServerOptimiser, f"the server of {self.name}")
        for key in self.work:
            check_known(f"key in the work of {self.name}", key, _UNSET)

    def with_momentum(self, momentum: Direction | None) -> "Method":
        """This method with a momentum (:class:`MVR`, :class:`GlobalMomentum`), or without."""
        direction = Plain() if momentum is None else momentum
        expect(direction, Direction, "momentum")
        if not isinstance(self.direction, Plain | MVR | GlobalMomentum):
            if isinstance(direction, Plain):
                return self
            raise FedShuffleError(
                f"{self.name} has a direction of its own ({self.direction!r}) and takes no other"
                " momentum. Give it the momentum 'none', or leave it out."
            )
        return dataclasses.replace(self, direction=direction)

    def with_averaging(self, other: "Method") -> "Method":
        """This method's direction and server with the averaging and the local work of another.

        >>> from fedshuffle import methods
        >>> methods.get("scaffold+fedshuffle").averaging == methods.get("fedshuffle").averaging
        True
        """
        if other.pooled and not self.pooled:
            raise FedShuffleError(
                f"{other.name} has all data in one place, so it has no averaging to lend to"
                f" {self.name}. Use {self.name}+fedshuffle."
            )
        defaults = {"direction": Plain(), "server": Average()}
        mine = [part for part, default in defaults.items() if getattr(self, part) != default]
        theirs = [part for part, default in defaults.items() if getattr(other, part) != default]
        if lost := [part for part in theirs if part not in mine]:
            remedy = f"Write {other.name}+{self.name}"
            if mine:
                remedy = (
                    f"For both, use dataclasses.replace(methods.get({other.name!r}),"
                    f" {mine[0]}=methods.get({self.name!r}).{mine[0]}) in Python"
                )
            raise FedShuffleError(
                f"{self.name}+{other.name} is {self.name} with the averaging and the local work of"
                f" {other.name}, and would drop the {' and the '.join(lost)} of {other.name}"
                f" ({', '.join(repr(getattr(other, part)) for part in lost)}). {remedy}."
            )
        averaging = other.averaging
        if self.direction.remembers:  # its q belongs to its algorithm
            averaging = dataclasses.replace(averaging, normaliser=self.averaging.normaliser)
        mixed = dataclasses.replace(
            self,
            name=f"{self.name}+{other.name}",
            summary=f"{self.summary}; averaging of {other.name}",
            averaging=averaging,
            work={**other.work, **self.work},
        )
        return mixed.with_probabilities(self.averaging.estimate or other.averaging.estimate)

    def with_probabilities(self, probabilities: "str | Estimate | None") -> "Method":
        """This method with inclusion probabilities that are estimated; None leaves it as it is.

        >>> from fedshuffle import methods
        >>> methods.get("fedshuffle").with_probabilities("estimate:ewma:0.1").averaging.normaliser
        InclusionProbability(MovingRate(share=0.1))
        """
        if probabilities is None:
            return self
        estimate = resolve_estimate(probabilities)
        if not self.averaging.by_probability:
            other = (
                "" if self.direction.remembers else f", or {self.name.partition('+')[0]}+fedshuffle"
            )
            raise FedShuffleError(
                f"{self.name} does not divide by inclusion probabilities, so there is nothing to"
                f" estimate: leave probabilities out, or use a method that does, as fedshuffle,"
                f" fedau{other}."
            )
        normaliser = InclusionProbability(estimate)
        return dataclasses.replace(
            self, averaging=dataclasses.replace(self.averaging, normaliser=normaliser)
        )

    def with_options(self, options: Mapping[str, str]) -> "Method":
        """This method with other values for its parameters, given as text.

        >>> from fedshuffle import methods
        >>> methods.get("fedprox:mu=0.5").direction
        Proximal(mu=0.5)
        """
        parts = {"direction": self.direction, "server": self.server, "averaging": self.averaging}
        return dataclasses.replace(self, **replaced(parts, options, self.name))

    @property
    def momentum(self) -> str:
        """The momentum in a word, as the command line writes it."""
        kind = _MOMENTA.get(type(self.direction))
        return "none" if kind is None else f"{kind}:{self.direction.a:g}"  # type: ignore[attr-defined]

    @property
    def style(self) -> tuple[str, str]:
        """The label and the colour; a method without goes by its name, in black."""
        return (self.family.styles if self.family else {}).get(self.name, (self.name, "#000000"))

    def describe(self) -> dict[str, str]:
        """The parts of the method by name."""
        return {
            "method": self.name,
            **self.averaging.describe(),
            "momentum": self.momentum,
            "direction": repr(self.direction),
            "server": repr(self.server),
        }

    def local_work(self, work: LocalWork) -> LocalWork:
        """The local work as this method does it, or an error where the method needs another.

        >>> from fedshuffle import methods
        >>> methods.get("fedavg").local_work(LocalWork(epochs=2)).order
        'replacement'
        """
        fixed = {}
        for name, needed in self.work.items():
            given = getattr(work, name)
            if np.array_equal(given, _UNSET[name]):
                fixed[name] = needed
            elif not (np.array_equal(given, needed) or _same_kind(given, needed)):
                shown = "all examples of a client" if needed == WHOLE_CLIENT else repr(needed)
                has = repr(str(given) if name == "optimiser" else given)
                raise FedShuffleError(
                    f"{self.name} needs {name} = {shown} in its local work, but it is set to {has}."
                    f" Leave {name} out, or choose another method."
                )
        return dataclasses.replace(work, **fixed).resolved()

    def drop_fixed(self, work: LocalWork) -> LocalWork:
        """The local work without what this method fixes, to run many methods on one setting.

        >>> from fedshuffle import methods
        >>> methods.get("fedavg").drop_fixed(LocalWork(epochs=2, order="once")).order is None
        True
        """
        return dataclasses.replace(work, **{name: _UNSET[name] for name in self.work})

    def clients(self, federation: "Federation") -> "Federation":
        """The federation as this method sees it."""
        return federation.pooled() if self.pooled else federation

    def sampling(self, sampling: Sampling) -> Sampling:
        """The sampling as this method sees it."""
        if not self.pooled:
            return sampling
        if not isinstance(sampling, Full):
            raise FedShuffleError(
                f"{self.name} has all data in one place, so there are no clients to sample"
                f" ({sampling!r}). Use sampling 'full'."
            )
        return Full(1)

    def timing(self, timing: Timing, workload: Workload, two_phase: bool = False) -> Timing:
        """The timing with what this method asks of clients and lets them compute in a round; a
        two-phase sampling asks once more.

        MIME computes two gradients per step, and a full one besides.

        >>> from fedshuffle import Federation, methods
        >>> clients = Federation.from_sizes([10])
        >>> timing = Timing.of("wait", "fixed:1", clients)
        >>> workload = LocalWork().on(clients.sizes)
        >>> clock = methods.get("mime").timing(timing, workload).clock
        >>> clock.mean(np.arange(1), np.array([10])).tolist()
        [30.0]
        """
        if timing.clock is None:
            return timing
        if self.pooled:
            raise FedShuffleError(
                f"{self.name} has all data in one place, so there are no clients that take their"
                " time: leave out the clock, or use another method."
            )
        costs = self.direction
        full = costs.full_gradients * workload.steps_per_epoch
        trips = costs.trips + two_phase
        clock = timing.clock.charged(costs.gradients_per_step, full, trips)
        return dataclasses.replace(timing, clock=clock)

    def check(self, workload: Workload, sampling: Sampling) -> None:
        """Refuse a setting for which the method is not defined."""
        if self.balanced_only:  # else not computed: the table of all clients' steps may be large
            planned, interruption = workload.possible_steps[0], workload.work.interruption
            steps = np.unique(planned)
            done = workload.done(planned[:, 0], np.arange(len(planned)), seed=0, round=0)
            uneven = len(steps) > 1 or len(np.unique(done)) > 1
            if not isinstance(sampling, Full) or uneven or (interruption and interruption.random):
                remedy = "Use fedshuffle, which is the same method there and consistent beyond."
                if not workload.optimiser.linear:
                    remedy = "Give every client LocalWork(steps=...), and leave out the sampling."
                raise FedShuffleError(
                    f"{self.name} is defined for full participation and equal numbers of local"
                    f" steps (here: sampling {sampling!r}, {steps[0]} to {steps[-1]} steps,"
                    f" interruption {interruption!r}). {remedy}"
                )
        if self.direction.needs_linear and not workload.optimiser.linear:
            raise FedShuffleError(
                f"{self.name} reads gradients off the clients' updates, and {workload.optimiser}"
                " rescales them. Use the local optimiser 'sgd', with momentum if you like, or"
                " another method, such as fedavgm."
            )
        if isinstance(sampling, Buffers) and not self.direction.stale_models:
            what = self.name if self.momentum == "none" else f"momentum {self.momentum}"
            raise FedShuffleError(
                f"asynchronous schedule {str(sampling.schedule)!r} does not go with {what}, whose"
                " clients need more than the model that they start from: use fedshuffle,"
                " fedprox+fedshuffle or fedadam+fedshuffle."
            )
        if not sampling.two_phase:
            return
        if self.direction.remembers:
            raise needs_every_update(self)
        if not self.averaging.by_probability:
            raise FedShuffleError(
                f"{self.name} normalises over the cohort, and with optimal client sampling nobody"
                " knows what that minimises. Use a method that aggregates by inclusion probability,"
                " as fedshuffle, or this one with its averaging (NAME+fedshuffle)."
            )
        if self.direction.client_state or self.direction.needs_estimate:
            raise needs_every_update(self)

    def round(
        self, state: State, cohort: Cohort, settings: RoundSettings
    ) -> Generator[Request, Answer, State]:
        """One round as a sequence of requests to an engine; returns the state after it."""
        if not len(cohort.clients) and not self.direction.every_round:
            return empty_round(self, state, settings)
        after: State = yield from MethodRound(self, state, cohort, settings).requests()
        return after


def _same_kind(given: object, needed: object) -> bool:
    """Whether both are local optimisers of one kind; what is needed may be a text."""
    if not (isinstance(given, LocalOptimiser) and isinstance(needed, str | LocalOptimiser)):
        return False
    return given.kind == LocalOptimiser.of(needed).kind
