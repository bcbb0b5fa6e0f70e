"""Fast ways to compute gradients: by hand for a stack of linear layers, or through vmap.

By hand, the matrix product that computes a layer's gradient adds it to the parameters. The same
lines serve one client (matrices) and many side by side (a leading dimension everywhere).

Every fast way is compared with the reference once, before it is used. The result depends on the
problem alone: it is the same in every worker and in a resumed run.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedshuffle import losses
from fedshuffle._arrays import IntArray
from fedshuffle.engines.base import client_context, gradients
from fedshuffle.engines.cpu_tuning import threads_for
from fedshuffle.engines.problem import Loss, Problem
from fedshuffle.engines.reference import gradient_at
from fedshuffle.errors import FedShuffleError

_CLIENTS = 16  # their first and last examples are tried; padding is in the last
_aten: Any = torch.ops.aten

Tables = list[Tensor]
"""The parameters of many models: one table per parameter, one row per model."""

Batch = tuple[Tensor, ...]
Descend = Callable[..., Tensor]
"""``descend(at, batch, shares, into, keep)``: for every client i (a row everywhere)
``into_i <- keep_i into_i + sum_j shares_ij grad f_ij(at_i)`` over the examples j of its minibatch.
Returns the loss of each minibatch, or by hand what :attr:`ByHand.losses` takes.
"""


class ByHand(NamedTuple):
    """Gradients by hand, and how to read the losses off what each call returns."""

    descend: Descend
    losses: Callable[[Tensor], Tensor]
    """The loss of each example, from one number per example."""


_Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
"""``forward(z)`` works in place; ``backward(slope, output)`` needs only the output."""

_NONE: _Activation = (lambda z: z, lambda slope, _: slope)
_ACTIVATIONS: dict[type[nn.Module], _Activation] = {
    nn.Identity: _NONE,
    nn.ReLU: (torch.relu_, lambda slope, output: _aten.threshold_backward(slope, output, 0)),
    nn.Tanh: (torch.tanh_, _aten.tanh_backward),
    nn.Sigmoid: (torch.sigmoid_, _aten.sigmoid_backward),
}


class _Layer(NamedTuple):
    """A linear layer: the positions of its parameters, its outputs, and what follows it."""

    weight: int
    bias: int | None
    width: int
    activation: _Activation = _NONE


def by_hand(problem: Problem) -> ByHand | None:
    """The gradient of a stack of linear layers; None for any other model, and where a transform
    makes what the model sees of the federation's fields.

    For one client, ``shares`` and ``keep`` are numbers, and tables are the parameters themselves.
    """
    layers = _layers(problem) if problem.federation.transform is None else []
    slope = _slope(problem, layers[-1].width) if layers else None
    return None if slope is None else ByHand(partial(_descend, layers, slope[0]), slope[1])


def _descend(
    layers: Sequence[_Layer],
    slope_of: "_SlopeOf",
    at: Sequence[Tensor],
    batch: Batch,
    shares: float | Tensor,
    into: Sequence[Tensor],
    keep: float | Tensor | None = None,
) -> Tensor:
    """``into <- keep into + sum_j shares_j grad f_j(at)``; ``into`` may be ``at`` itself."""
    inputs, targets = batch
    many = at[0].ndim == 3
    output, outputs = inputs.flatten(2 if many else 1), []
    for layer in layers:
        outputs.append(output)
        weight = at[layer.weight].mT
        if layer.bias is None:
            output = output @ weight
        elif many:
            output = torch.baddbmm(at[layer.bias].unsqueeze(1), output, weight)
        else:
            output = torch.addmm(at[layer.bias], output, weight)
        output = layer.activation[0](output)
    (slope, observed), alpha = slope_of(output, targets), 1.0
    if isinstance(shares, Tensor):
        slope.mul_(shares.unsqueeze(2))
    else:
        alpha = shares
    of_weight = of_bias = 1.0 if keep is None else keep
    if isinstance(keep, Tensor):
        of_weight, of_bias = keep.view(-1, 1, 1), keep.view(-1, 1)
    shrinks = isinstance(keep, Tensor) or of_weight != 1
    add_product = Tensor.baddbmm_ if many else Tensor.addmm_
    for layer in reversed(layers):
        slope = layer.activation[1](slope, output)
        output = outputs.pop()
        # The layer below needs the weights before they change.
        below = slope @ at[layer.weight] if outputs else slope
        if shrinks:
            into[layer.weight].mul_(of_weight)
        add_product(into[layer.weight], slope.mT, output, alpha=alpha)
        if layer.bias is not None:
            bias = into[layer.bias]
            if shrinks:
                bias.mul_(of_bias)
            bias.add_(slope.sum(dim=-2), alpha=alpha)
        slope = below
    return observed


def _layers(problem: Problem) -> list[_Layer]:
    """The linear layers of the model with what follows each; none if it is no such stack."""
    layers: list[_Layer] = []
    flat = problem.fields[0].ndim == 2
    positions = count()
    for module in _leaves(problem.model):
        if type(module) is nn.Linear and flat:
            weight, bias = next(positions), None if module.bias is None else next(positions)
            layers.append(_Layer(weight, bias, module.out_features))
        elif type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            flat = True
        elif type(module) in _ACTIVATIONS and layers and layers[-1].activation is _NONE:
            layers[-1] = layers[-1]._replace(activation=_ACTIVATIONS[type(module)])
        elif type(module) is not nn.Identity:
            return []
    whole = next(positions) == len(problem.parameters) == len(list(problem.model.parameters()))
    return layers if whole else []


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that run one after another; a module with hooks counts as unknown."""
    if type(module) is nn.Sequential and not hooked(module):
        for child in module:
            yield from _leaves(child)
    else:
        yield nn.Module() if hooked(module) else module


_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def hooked(module: nn.Module) -> bool:
    """Whether a module may do more than its class says: by hooks, or by its own ``forward``."""
    everywhere = any(getattr(nn.modules.module, f"_global_{hooks}") for hooks in _HOOKS)
    own = any(getattr(module, f"_{hooks}") for hooks in _HOOKS)
    return everywhere or own or "forward" in vars(module)


_SlopeOf = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""The derivative of each example's loss by the model's output, and a number per example from which
its loss follows. That number costs one operation; losses are computed once for many steps."""


def _slope(problem: Problem, width: int) -> tuple[_SlopeOf, Callable[[Tensor], Tensor]] | None:
    """The derivative and the losses, where they are known."""
    if len(problem.fields) != 2 or not problem.fields[0].is_floating_point():
        return None
    if not isinstance(problem.loss, losses.MeanLoss):  # only its equality can be trusted
        return None
    targets = problem.fields[1]
    if problem.loss == losses.squared_error:
        fits = targets.is_floating_point() and targets.shape[1:] == (width,)
        return (_squared_error_slope, lambda norms: 0.5 * norms.square()) if fits else None
    if problem.loss != losses.cross_entropy or targets.dtype != torch.int64 or targets.ndim != 1:
        return None
    parts = torch.split(targets, 1 << 20)  # a negative label means that it does not count
    classes = all(int(part.min()) >= 0 and int(part.max()) < width for part in parts)
    return (_cross_entropy_slope, _cross_entropies) if classes else None


def _squared_error_slope(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The error of each example, and its norm."""
    slope = torch.sub(outputs, targets)
    return slope, torch.linalg.vector_norm(slope, dim=-1)


def _cross_entropy_slope(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """``softmax(logits) - onehot(labels)``, and the probability of each label."""
    if logits.ndim == 2:
        slope = torch.softmax(logits, dim=-1)
    else:  # over a few classes of many clients, torch's softmax is several times slower than this
        slope = logits.sub(logits.amax(dim=-1, keepdim=True)).exp_()
        slope.div_(slope.sum(dim=-1, keepdim=True))
    if labels.ndim < logits.ndim:
        labels = labels.unsqueeze(-1)
    probabilities = slope.gather(-1, labels)
    return slope.scatter_(-1, labels, -1.0, reduce="add"), probabilities


def _cross_entropies(probabilities: Tensor) -> Tensor:
    """``-log p``; a probability that is zero by rounding counts as the smallest number."""
    return -probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def column(values: Tensor, like: Tensor) -> Tensor:
    """One number per row, to be multiplied with a table."""
    return values.view(-1, *[1] * (like.ndim - 1))


def scaled_rows(tables: Tables, by: Tensor) -> Tables:
    """Every row times its number."""
    return [table * column(by, table) for table in tables]


def flat_rows(table: Tensor) -> Tensor:
    """Every row as a vector."""
    return table.reshape(len(table), -1)


class _Objective(nn.Module):
    """Model and loss as one module, so that functional_call can swap the parameters."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self.loss(self.model, *batch)


def by_vmap(problem: Problem) -> Descend:
    """Differentiates any model that vmap can run; refuses one whose options vmap ignores."""
    _refuse_ignored_options(problem)
    # On a copy, since functional_call swaps the parameters of the module itself.
    objective = _Objective(problem.replica(), problem.loss)
    names = [f"model.{name}" for name in problem.parameters]

    def loss(model: Tables, batch: Batch) -> Any:
        return functional_call(objective, dict(zip(names, model, strict=True)), batch)

    losses: Callable[..., Tensor] = vmap(loss)

    def descend(
        at: Tables, batch: Batch, shares: Tensor, into: Tables, keep: Tensor | None
    ) -> Tensor:
        leaves = [table.detach().requires_grad_() for table in at]
        try:
            each = losses(leaves, batch)
        except Exception as error:
            raise FedShuffleError(
                f"this model or loss cannot be vectorized ({type(error).__name__}: {error})."
                " Use the engine 'reference' to see at which client, or if it can be trained."
            ) from error
        # Clients are independent, so one backward pass serves them all.
        found = gradients(each.sum(dim=0), leaves)
        by = shares.sum(dim=1)
        for table, gradient in zip(into, found, strict=True):
            if keep is not None:
                table.mul_(column(keep, table))
            table.addcmul_(gradient, column(by, table))
        return each.detach()

    return descend


def _refuse_ignored_options(problem: Problem) -> None:
    """Options of embeddings whose effect the comparison with the reference might not show."""
    found = ["max_norm"] if problem.changes_parameters else []
    for module in problem.model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            found += ["padding_idx"] * (module.padding_idx is not None)
            found += ["scale_grad_by_freq"] * module.scale_grad_by_freq
    if found:
        raise FedShuffleError(
            f"an embedding has {found[0]}, which has no effect in the vectorized engine. Use the"
            " engine 'sequential'."
        )


class SlowerWarning(UserWarning):
    """A model is trained in a slower way, since a faster one computes something else."""


def tolerance(dtype: torch.dtype) -> float:
    """The relative error that rounding may cause after some steps."""
    return min(0.1, max(1e-9, 1e4 * torch.finfo(dtype).eps))


def fault(
    problem: Problem, way: str, compute: Callable[[Tensor, Batch], Tensor], warn: bool = False
) -> str:
    """What is wrong with ``compute(points, batch)``, which should give for every point a row: the
    gradient of the mean loss, as by the reference. Empty if it does.

    Warn, once, if it gives other gradients and a slower way takes its place.
    """
    if way in problem.tried:
        return problem.tried[way]
    points, rows = _points_and_rows(problem)
    limit, off, why = tolerance(problem.dtype), 0.0, ""
    for some in (rows[[0, -1]], rows):  # what cannot run fails in the memory of a small minibatch
        wanted = _gradients(problem, points, some)
        try:
            with threads_for(problem, len(some)):
                found = compute(points, problem.batch(some))
            if len(some) == len(rows):
                off = max(_distance(problem, *pair) for pair in zip(found, wanted, strict=True))
                why = f"its gradient is off by {off:.2g} of its size" if off > limit else ""
        except Exception as error:
            cause = error.__cause__ or error
            why = f"{type(cause).__name__}: " + str(cause).split("\n")[0]
            break
    problem.tried[way] = why
    if warn and off > limit:
        warnings.warn(
            f"{way}, the model computes something else: {why}. So it is trained in a slower way,"
            " which agrees with the reference.",
            SlowerWarning,
            stacklevel=2,
        )
    return why


def gradient_norm(problem: Problem) -> float:
    """The norm of a gradient by the reference, for :func:`check_gradient_norm`. Of two examples:
    every worker computes it, and a minibatch of a large model may be no longer.
    """
    points, rows = _points_and_rows(problem)
    return float(_gradients(problem, points[1:], rows[[0, -1]])[0].norm())


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


def _points_and_rows(problem: Problem) -> tuple[Tensor, IntArray]:
    """Two points to try, and the rows of some examples."""
    noise = torch.randn(len(problem.start), generator=torch.Generator().manual_seed(0))
    points = torch.stack([problem.start, problem.start + 0.05 * noise.to(problem.start)])
    offsets = problem.federation.offsets
    clients = np.linspace(0, len(offsets) - 2, _CLIENTS).round().astype(np.int64)
    return points, np.unique([offsets[clients], offsets[clients + 1] - 1])


def _gradients(problem: Problem, points: Tensor, rows: IntArray) -> list[Tensor]:
    """The reference's gradients over these examples."""
    look = client_context(problem, 0, 0, "first look at the model")
    with threads_for(problem, len(rows)), look:
        return [gradient_at(problem, point, rows, seed=0)[0] for point in points]


def _distance(problem: Problem, have: Tensor, want: Tensor) -> float:
    """The largest error of a parameter's gradient, relative to it or to a tenth of the whole."""
    if not torch.isfinite(want).all():
        return 0.0  # training will say so
    lengths = [parameter.numel() for parameter in problem.parameters.values()]
    pairs = zip(torch.split(have - want, lengths), torch.split(want, lengths), strict=True)
    norms = torch.tensor([[float(off.norm()), float(part.norm())] for off, part in pairs])
    sizes = norms[:, 1].clamp_min(max(0.1 * float(want.norm()), 1e-30))
    return float((norms[:, 0] / sizes).nan_to_num(nan=math.inf).max())
