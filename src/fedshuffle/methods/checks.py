"""What a direction says in a round, looked at before anybody walks: a slip has one clear error."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np

from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import Probe, Steering
from fedshuffle.methods.directions import Direction, Heading, Memory, RoundStart

if TYPE_CHECKING:
    from torch import Tensor

SERVER = "server."
"""In a state's memory, what begins so is the server optimiser's."""


@final
class Dialogue:
    """A round of a direction: its requests one by one, then what it wants remembered."""

    def __init__(self, direction: Direction, start: RoundStart) -> None:
        self.direction = direction
        self.start = start
        self._steps = direction.round(start)
        if not inspect.isgenerator(self._steps):
            raise self._wrong(
                f"gives {_told(self._steps)}: write it as a generator, with 'yield Heading(...)'"
            )

    def ask(self, answer: Any = None) -> Probe | Heading:
        """The next request, given the answer to the one before."""
        try:
            request = self._steps.send(answer)
        except StopIteration:
            raise self._wrong(
                "ends without a heading: yield one, so that clients know where to walk"
            ) from None
        if isinstance(request, Probe):
            self._check_probe(request)
        elif isinstance(request, Heading):
            self._check_heading(request)
        else:
            raise self._wrong(f"yields {_told(request)}: yield a Probe or a Heading")
        return request

    def finish(self, reported: Tensor | None) -> Memory:
        """What to remember, given the sums that the heading asked for."""
        try:
            self._steps.send(reported)
        except StopIteration as stop:
            self._check_memory(stop.value)
            memory: Memory = stop.value
            return memory
        raise self._wrong("yields again after its heading: the heading is the last request")

    def _check_probe(self, probe: Probe) -> None:
        for point in probe.points:
            self._check_like_model(point, "a point of its probe")
        shape = np.shape(probe.weights)
        if len(shape) != 2 or shape[0] != len(probe.clients):
            raise self._wrong(
                f"yields a probe of {len(probe.clients)} clients with weights of shape {shape}:"
                " give a row per client and a column per sum, as weights[:, None] for one sum"
            )

    def _check_heading(self, heading: Heading) -> None:
        n = len(self.start.cohort.clients)
        steering, report = heading.steering, heading.report
        each = [steering] if isinstance(steering, Steering) else steering
        if not isinstance(steering, Steering) and len(each) != n:
            raise self._wrong(
                f"heads with {len(each)} steerings for a cohort of {n}: give one for all, or one"
                " for each client of the cohort"
            )
        for one in each:
            if not isinstance(one, Steering):
                raise self._wrong(f"heads with {_told(one)}: give a Steering")
            for part, name in ((one.v, "v"), (one.scale, "scale")):
                if part is not None:
                    self._check_like_model(part, f"the {name} of its steering")
        shape = None if report is None else np.shape(report)
        if shape is not None and (len(shape) not in (1, 2) or shape[0] != n):
            raise self._wrong(
                f"asks for a report with weights of shape {shape} from a cohort of {n}: give a"
                " number, or a row, for each client of the cohort"
            )

    def _check_memory(self, memory: object) -> None:
        from torch import Tensor

        if not isinstance(memory, Memory):
            raise self._wrong(f"returns {_told(memory)}: return a Memory")
        if not isinstance(memory.server, Mapping):
            raise self._wrong(f"returns {_told(memory.server)} as the server's: a mapping by name")
        for name, value in memory.server.items():
            if not isinstance(value, Tensor):
                raise self._wrong(f"remembers {_told(value)} as {name!r}: tensors can be kept")
            if str(name).startswith(SERVER):
                raise self._wrong(f"remembers {name!r}: names with {SERVER!r} are not its own")
        rows = memory.clients
        if rows is None:
            return
        if not self.direction.client_state:
            raise self._wrong(
                "returns rows for clients to keep, but says that they keep nothing: set"
                " client_state = True in its class"
            )
        wanted = (len(self.start.cohort.clients), *self.start.x.shape)
        if not isinstance(rows, Tensor) or tuple(rows.shape) != wanted:
            raise self._wrong(
                f"returns {_told(rows)} for clients to keep: give a row for each client of the"
                f" cohort, shape {wanted}"
            )

    def _check_like_model(self, value: object, what: str) -> None:
        from torch import Tensor

        x = self.start.x
        if not isinstance(value, Tensor) or value.shape != x.shape or value.dtype != x.dtype:
            raise self._wrong(
                f"gives {_told(value)} as {what}: it must be like the model, a tensor of shape"
                f" {tuple(x.shape)} and {x.dtype}"
            )

    def _wrong(self, what: str) -> FedShuffleError:
        return FedShuffleError(f"{type(self.direction).__name__}.round {what}.")


def check_step(step: object, x: Tensor, server: object) -> None:
    """Refuse what is not a model and something to remember."""
    from torch import Tensor

    name = f"{type(server).__name__}.step"
    if not (isinstance(step, tuple) and len(step) == 2 and isinstance(step[1], Mapping)):
        raise FedShuffleError(
            f"{name} gives {_told(step)}: return the next model and a mapping of tensors to keep."
        )
    after = step[0]
    if not isinstance(after, Tensor) or after.shape != x.shape or after.dtype != x.dtype:
        raise FedShuffleError(
            f"{name} gives {_told(after)} as the next model: it must be like the last, a tensor of"
            f" shape {tuple(x.shape)} and {x.dtype}."
        )
    for key, value in step[1].items():
        if not isinstance(value, Tensor):
            raise FedShuffleError(f"{name} keeps {_told(value)} as {key!r}: tensors can be kept.")


def _told(value: object) -> str:
    """A value in a few words."""
    if value is None:
        return "nothing (None)"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None:
        return f"a {type(value).__name__} of shape {tuple(shape)} and {dtype}"
    return f"a {type(value).__name__}, {value!r:.40}"
