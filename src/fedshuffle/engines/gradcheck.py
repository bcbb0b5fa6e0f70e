"""Every fast way to compute gradients is compared with the reference once, before it is used.

It is tried on examples from all over the federation, so the result depends on the problem alone: it
is the same in every worker and in a resumed run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedshuffle._arrays import IntArray
from fedshuffle.engines.base import client_context
from fedshuffle.engines.cpu_tuning import threads_for
from fedshuffle.engines.problem import Fault, Problem
from fedshuffle.engines.reference import gradient_at
from fedshuffle.errors import FedShuffleError

_CLIENTS = 16  # their first and last examples are tried; padding is in the last

Gradients = Callable[[Tensor, tuple[Tensor, ...]], Tensor]
"""``gradients(points, batch)``: for every point a row, the gradient of the mean loss over the
batch, with the seed 0 for the model's own randomness.
"""


class SlowerWarning(UserWarning):
    """A model is trained in a slower way, since a faster one computes something else."""


def tolerance(dtype: torch.dtype) -> float:
    """The relative error that rounding may cause after some steps."""
    return min(0.1, max(1e-9, 1e4 * torch.finfo(dtype).eps))


def fault(problem: Problem, way: str, make: Callable[[], Gradients]) -> Fault | None:
    """What is wrong with a way to compute gradients; None if it gives those of the reference."""
    if way not in problem.tried:
        problem.tried[way] = _fault(problem, make)
    return problem.tried[way]


def trusted(problem: Problem, way: str, make: Callable[[], Gradients]) -> bool:
    """Whether to use a way to compute gradients; warn, once, if it gives other gradients."""
    first = way not in problem.tried
    found = fault(problem, way, make)
    if found and found.differs and first:
        warnings.warn(
            f"{way}, the model computes something else: {found.why}. So it is trained in a slower"
            " way, which agrees with the reference.",
            SlowerWarning,
            stacklevel=2,
        )
    return found is None


def gradient_norm(problem: Problem) -> float:
    """The norm of a gradient by the reference, for :func:`check_gradient_norm`."""
    return float(_reference(problem)[2][1].norm())


def check_gradient_norm(problem: Problem, wanted: float) -> None:
    """Refuse to compute something else than the process that sent the problem."""
    if problem.device.type != "cpu" or not math.isfinite(wanted):
        return
    if not abs(gradient_norm(problem) - wanted) <= tolerance(problem.dtype) * wanted:
        raise FedShuffleError(
            "this model computes something else in another process: something was changed here"
            " that does not travel with it, such as hooks of all modules or a layer's class. Use"
            " the engine 'sequential', or put the change into the model."
        )


def _reference(problem: Problem) -> tuple[Tensor, IntArray, list[Tensor]]:
    """Two points, the rows of some examples, and the reference's gradients there."""
    noise = torch.randn(len(problem.start), generator=torch.Generator().manual_seed(0))
    points = torch.stack([problem.start, problem.start + 0.05 * noise.to(problem.start)])
    offsets = problem.federation.offsets
    clients = np.linspace(0, len(offsets) - 2, _CLIENTS).round().astype(np.int64)
    rows = np.unique([offsets[clients], offsets[clients + 1] - 1])
    look = client_context(problem, 0, 0, "first look at the model")
    with threads_for(problem, len(rows)), look:
        return points, rows, [gradient_at(problem, point, rows, seed=0)[0] for point in points]


def _fault(problem: Problem, make: Callable[[], Gradients]) -> Fault | None:
    points, rows, wanted = _reference(problem)
    try:
        with threads_for(problem, len(rows)):
            found = make()(points, problem.batch(rows))
    except Exception as error:
        cause = error.__cause__ or error
        first = str(cause).split("\n")[0]
        return Fault(f"{type(cause).__name__}: {first}", differs=False)
    off = max(_distance(problem, *pair) for pair in zip(found, wanted, strict=True))
    if off <= tolerance(problem.dtype):
        return None
    return Fault(f"its gradient is off by {off:.2g} of its size", differs=True)


def _distance(problem: Problem, have: Tensor, want: Tensor) -> float:
    """The largest relative error of any parameter's gradient; that of small ones by a tenth of the
    whole. Zero where the reference is not finite: training will say so.
    """
    if not torch.isfinite(want).all():
        return 0.0
    lengths = [parameter.numel() for parameter in problem.parameters.values()]
    pairs = zip(torch.split(have - want, lengths), torch.split(want, lengths), strict=True)
    norms = torch.tensor([[float(off.norm()), float(part.norm())] for off, part in pairs])
    sizes = norms[:, 1].clamp_min(max(0.1 * float(want.norm()), 1e-30))
    return float((norms[:, 0] / sizes).nan_to_num(nan=math.inf).max())
