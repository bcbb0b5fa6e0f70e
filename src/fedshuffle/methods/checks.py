"""Rounds of a direction and a server, checked: a mistake in a user's own has one clear error."""

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedshuffle.errors import FedShuffleError
from fedshuffle.kernel import FullGradient, StepCoefficients
from fedshuffle.methods.directions import (
    Direction,
    LocalPlan,
    MethodState,
    Reported,
    RoundContext,
    Steps,
)
from fedshuffle.transforms import Transform

if TYPE_CHECKING:
    from torch import Tensor


def begin_round(
    direction: Direction, context: RoundContext, weight_decay: float
) -> Generator[FullGradient, Any, tuple[Steps, LocalPlan]]:
    """A direction up to its local plan: the full gradients it asks for, checked."""
    name, answer = f"{type(direction).__name__}.round", None
    steps = direction.round(context)
    if not isinstance(steps, Generator):
        raise FedShuffleError(
            f"{name} gives {shown(steps)}: write it as a generator, with 'yield LocalPlan(...)'."
        )
    while True:
        try:
            request = steps.send(answer)
        except StopIteration:
            raise FedShuffleError(f"{name} ends without a LocalPlan: yield one.") from None
        if isinstance(request, LocalPlan):
            _check_plan(request, context, direction, name)
            return steps, request
        if not isinstance(request, FullGradient):
            raise FedShuffleError(
                f"{name} yields {shown(request)}: yield a FullGradient or a LocalPlan."
            )
        for point in request.points:
            check_tensor(point, f"{name}: a point", like=context.x)
        _check_keeps(request.chain, direction, name)
        answer = yield replace(request, weight_decay=weight_decay)


def end_round(direction: Direction, steps: Steps, reported: Reported) -> MethodState:
    """The state of a direction after local training, checked."""
    name = f"{type(direction).__name__}.round"
    try:
        steps.send(reported)
    except StopIteration as stop:
        state: MethodState = stop.value
    else:
        raise FedShuffleError(f"{name} yields again after its LocalPlan: let that be the last.")
    check_state(state, f"{name}: the state")
    return state


def _check_plan(plan: LocalPlan, context: RoundContext, direction: Direction, name: str) -> None:
    n, told = len(context.cohort.clients), plan.coefficients
    if callable(told):
        if not direction.client_state:
            raise FedShuffleError(
                f"{name} plans by what clients keep: set client_state = True in its class."
            )
        told = []
    elif isinstance(told, StepCoefficients):
        told = [told]
    elif len(told) != n:
        raise FedShuffleError(
            f"{name} gives {len(told)} StepCoefficients for {n} clients: give 1 or {n}."
        )
    for one in told:
        check_coefficients(one, context.x, name)
    for what in ("report", "state_weights", "factors"):
        weights = getattr(plan, what)
        if weights is not None and np.shape(weights) != (n,):
            raise FedShuffleError(
                f"{name} asks for a sum with {what} of shape {np.shape(weights)} from {n} clients:"
                " give a number for each of them."
            )
    if plan.keep is not None:
        _check_keeps(plan.keep, direction, name)


def check_coefficients(one: object, x: "Tensor", name: str) -> StepCoefficients:
    """The coefficients of a client's step, or a clear error."""
    if not isinstance(one, StepCoefficients):
        raise FedShuffleError(f"{name} plans {shown(one)}: give StepCoefficients.")
    for vector in ("v", "scale"):
        if (value := getattr(one, vector)) is not None:
            check_tensor(value, f"{name}: {vector}", like=x)
    return one


def _check_keeps(transform: Transform, direction: Direction, name: str) -> None:
    if transform.keeps_state and not direction.client_state:
        raise FedShuffleError(
            f"{name} lets clients keep a vector: set client_state = True in its class."
        )


def check_state(state: object, what: str) -> None:
    """Refuse what cannot be kept in a checkpoint."""
    if not isinstance(state, Mapping):
        raise FedShuffleError(f"{what} is {shown(state)}: give a mapping of tensors.")
    for name, value in state.items():
        check_tensor(value, f"{what}: {name}")


def check_tensor(value: object, what: str, like: "Tensor | None" = None) -> None:
    """Refuse what is not a tensor, of the shape and dtype of another if that is given."""
    from torch import Tensor

    if not isinstance(value, Tensor):
        raise FedShuffleError(f"{what} is {shown(value)}: give a tensor.")
    if like is not None and (value.shape, value.dtype) != (like.shape, like.dtype):
        raise FedShuffleError(
            f"{what} is {shown(value)}: it must be like the model, {shown(like)}."
        )


def shown(value: object) -> str:
    """A value in a few words."""
    if value is None:
        return "nothing (None)"
    if hasattr(value, "shape"):
        dtype = getattr(value, "dtype", None)
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {dtype}"
    return f"a {type(value).__name__}, {value!r:.40}"
