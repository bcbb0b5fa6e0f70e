"""A method: an averaging rule, a direction, a server optimiser, and what it asks of local work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray, expect
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.kernel import Order, Probe, Request, Steering, Walk
from fedshuffle.local_work import LocalWork, Workload
from fedshuffle.methods import checks
from fedshuffle.methods.averaging import FedShuffleGen, InclusionProbability, Participants
from fedshuffle.methods.directions import Direction, Memory, Plain, RoundStart
from fedshuffle.methods.momentum import MVR, GlobalMomentum
from fedshuffle.methods.options import replaced
from fedshuffle.methods.servers import Average, ServerOptimiser
from fedshuffle.sampling import Full, Optimal, Sampling
from fedshuffle.state import State

if TYPE_CHECKING:
    from torch import Tensor

    from fedshuffle.federation import Federation

Select = Callable[[FloatArray], tuple[NDArray[np.bool_], FloatArray]]
"""From the norms of the weighted updates: whose is sent, and with which probability each was."""

_MOMENTA: Mapping[type[Direction], str] = {MVR: "mvr", GlobalMomentum: "global"}
_SERVER = checks.SERVER


@final
@dataclass(frozen=True)
class Method:
    """A federated method over the one kernel.

    Args:
        name: how it is asked for.
        summary: one line for a person.
        averaging: the rules (c, w-tilde, q).
        direction: which way clients walk; the gradient itself by default.
        server: what the server does with the aggregated update; adds it by default.
        work: what the method changes in the local work it is given.
        balanced_only: defined only for full participation and equal numbers of local steps.
        pooled: there are no clients: one holds the data of all.
        reference: where it comes from.
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

    def __post_init__(self) -> None:
        expect(self.name, str, "the name of a method")
        expect(self.averaging, FedShuffleGen, f"the averaging of {self.name}")
        expect(self.direction, Direction, f"the direction of {self.name}")
        expect(self.server, ServerOptimiser, f"the server of {self.name}")
        known = [option.name for option in dataclasses.fields(LocalWork)]
        for key in self.work:
            if key not in known:
                raise unknown(f"key in the work of {self.name}", key, known)

    def with_momentum(self, momentum: Direction | None) -> Method:
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

    def with_averaging(self, other: Method) -> Method:
        """This method's direction and server with the averaging and the local work of another.

        >>> from fedshuffle import methods
        >>> methods.get("scaffold+fedshuffle").averaging == methods.get("fedshuffle").averaging
        True
        """
        self._check_nothing_is_lost(other)
        return dataclasses.replace(
            self,
            name=f"{self.name}+{other.name}",
            summary=f"{self.summary}; averaging of {other.name}",
            averaging=other.averaging,
            work={**other.work, **self.work},
        )

    def _check_nothing_is_lost(self, other: Method) -> None:
        """Refuse what reads as if both methods were at work, while one would be dropped."""
        if other.pooled and not self.pooled:
            raise FedShuffleError(
                f"{other.name} has all data in one place, so it has no averaging to lend to"
                f" {self.name}. Use {self.name}+fedshuffle."
            )
        lost = [
            part
            for part, plain in {"direction": Plain, "server": Average}.items()
            if isinstance(getattr(self, part), plain)
            and not isinstance(getattr(other, part), plain)
        ]
        if not lost:
            return
        remedy = f"Write {other.name}+{self.name}"
        if not (isinstance(self.direction, Plain) and isinstance(self.server, Average)):
            mine = "server" if lost == ["direction"] else "direction"
            remedy = (
                f"For both, use dataclasses.replace(methods.get({other.name!r}),"
                f" {mine}=methods.get({self.name!r}).{mine}) in Python"
            )
        raise FedShuffleError(
            f"{self.name}+{other.name} is {self.name} with the averaging and the local work of"
            f" {other.name}, and would drop the {' and the '.join(lost)} of {other.name}"
            f" ({', '.join(repr(getattr(other, part)) for part in lost)}). {remedy}."
        )

    def with_options(self, options: Mapping[str, str]) -> Method:
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

    def describe(self) -> dict[str, str]:
        """What the method is made of, by name."""
        return {
            "method": self.name,
            **self.averaging.describe(),
            "momentum": self.momentum,
            "direction": repr(self.direction),
            "server": repr(self.server),
        }

    def local_work(self, work: LocalWork) -> LocalWork:
        """The local work as this method does it."""
        return dataclasses.replace(work, **self.work)

    def clients(self, federation: Federation) -> Federation:
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

    def check(self, workload: Workload, sampling: Sampling) -> None:
        """Refuse a setting for which the method is not defined."""
        if self.balanced_only:  # the table of all clients' steps may be large
            steps = np.unique(workload.alone[0])
            if not isinstance(sampling, Full) or len(steps) > 1:
                raise FedShuffleError(
                    f"{self.name} is defined for full participation and equal numbers of local"
                    f" steps (here: sampling {sampling!r}, {steps[0]} to {steps[-1]} steps)."
                    " Use fedshuffle, which is the same method there and sound beyond."
                )
        if not isinstance(sampling, Optimal):
            return
        if not isinstance(self.averaging.normaliser, InclusionProbability):
            raise FedShuffleError(
                f"{self.name} normalises over the cohort, and with optimal client sampling nobody"
                " knows what that minimises. Use a method that aggregates by inclusion probability,"
                " as fedshuffle, or this one with its averaging (NAME+fedshuffle)."
            )
        if self.direction.client_state or self.direction.needs_estimate:
            raise self._learns_from_all()

    def _learns_from_all(self) -> FedShuffleError:
        return FedShuffleError(
            f"{self.name} learns from what every client of the cohort sends, and with optimal"
            " client sampling most send only a norm. Use another sampling, or another method."
        )

    def round(
        self,
        state: State,
        cohort: Participants,
        workload: Workload,
        seed: int,
        step_size: float,
        server_step_size: float,
        select: Select | None = None,
    ) -> Generator[Request, Any, State]:
        """One round as a sequence of requests to an engine; returns the state after it."""
        x = state.x
        mine, servers = _split(state.memory)
        rows = None if state.clients is None else state.clients.rows(cohort.clients, x.device)
        step_sizes = step_size * self.averaging.step_scale(cohort)

        start = RoundStart(x, Memory(mine, rows), cohort, step_sizes, self.averaging.normaliser)
        dialogue = checks.Dialogue(self.direction, start)
        request = dialogue.ask()
        while isinstance(request, Probe):
            decayed = dataclasses.replace(request, weight_decay=workload.work.weight_decay)
            request = dialogue.ask((yield decayed))

        if select and request.report is not None:
            raise self._learns_from_all()
        n = len(cohort.clients)
        weights = np.eye(n) if select else self.averaging.aggregation_weights(cohort)[:, None]
        report = np.zeros((n, 0)) if request.report is None else request.report
        columns = np.column_stack([weights, report])
        orders = _orders(cohort, workload, seed, step_sizes, request.steering, columns)
        sums = yield Walk(x, orders, columns.shape[1])
        update, reported = sums[: weights.shape[1]], sums[weights.shape[1] :]

        sent = None
        if select:
            chosen, update = self._selected(update, cohort, select)
            sent = len(chosen.clients)
        if sent == 0:  # as if nobody took part
            return dataclasses.replace(state, round=state.round + 1, sent=0)
        stepped = self.server.step(x, update[0], server_step_size, servers)
        checks.check_step(stepped, x, self.server)
        after, kept = stepped
        asked = reported if report.ndim > 1 else reported[0]
        memory = dialogue.finish(asked if asked.numel() else None)
        clients = state.clients
        if clients is not None and memory.clients is not None:
            clients = clients.updated(cohort.clients, memory.clients)
        named = {_SERVER + name: tensor for name, tensor in kept.items()}
        return State(after, {**memory.server, **named}, state.round + 1, clients, sent)

    def _selected(
        self, updates: Tensor, cohort: Participants, select: Select
    ) -> tuple[Participants, Tensor]:
        """Who of the cohort sends an update, and the sum of these, weighed by how likely it was."""
        norms = updates.norm(dim=1).cpu().numpy().astype(np.float64)
        asked, probability = select(self.averaging.aggregation_weights(cohort) * norms)
        chosen = cohort.only(asked, cohort.probability * probability)
        weights = updates.new_tensor(self.averaging.aggregation_weights(chosen))
        return chosen, (weights @ updates[np.flatnonzero(asked)])[None]


def _split(memory: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the direction remembers, and what the server optimiser does."""
    mine = {k: v for k, v in memory.items() if not k.startswith(_SERVER)}
    return mine, {k.removeprefix(_SERVER): v for k, v in memory.items() if k.startswith(_SERVER)}


def _orders(
    cohort: Participants,
    workload: Workload,
    seed: int,
    step_sizes: FloatArray,
    steering: Steering | Sequence[Steering],
    weights: FloatArray,
) -> list[Order]:
    steerings = [steering] * len(weights) if isinstance(steering, Steering) else steering
    by_client = zip(
        cohort.clients.tolist(),
        cohort.done.tolist(),
        step_sizes.tolist(),
        steerings,
        weights,  # rows as they are: of a large cohort that asks for every update, they are long
        strict=True,
    )
    work = workload.work
    return [
        Order(
            workload.stream(i, steps, seed, cohort.round),
            gamma,
            steering_,
            a,
            work.clip,
            work.weight_decay,
        )
        for i, steps, gamma, steering_, a in by_client
    ]
