r"""Server optimisers: what the server does with the aggregated update.

The update :math:`\Delta = \sum_{i \in S} a_i (y_i - x)` is the server's pseudo-gradient with its
sign turned; :math:`\eta_g` is the server step size.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from fedshuffle._arrays import number
from fedshuffle.errors import FedShuffleError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

Kept = Mapping[str, "Tensor"]
"""What a server optimiser remembers between rounds; empty before the first."""


class ServerOptimiser(abc.ABC):
    """Turns the aggregated update into the next model."""

    @abc.abstractmethod
    def step(self, x: Tensor, update: Tensor, step_size: float, kept: Kept) -> tuple[Tensor, Kept]:
        """The next model, and what to remember; neither argument is changed."""


@final
@dataclass(frozen=True)
class Average(ServerOptimiser):
    r"""The update itself: :math:`x \leftarrow x + \eta_g \Delta`."""

    def step(self, x: Tensor, update: Tensor, step_size: float, kept: Kept) -> tuple[Tensor, Kept]:
        return x + step_size * update, kept


class FromTorch(ServerOptimiser):
    """An optimiser of torch.optim, with minus the update as the gradient."""

    @abc.abstractmethod
    def make(self, parameters: list[Tensor], step_size: float) -> Optimizer:
        """The optimiser."""

    def step(self, x: Tensor, update: Tensor, step_size: float, kept: Kept) -> tuple[Tensor, Kept]:
        parameter = x.clone().requires_grad_()
        parameter.grad = -update
        optimiser = self.make([parameter], step_size)
        if kept:  # torch counts steps on the CPU
            optimiser.state[parameter] = {
                name: tensor.cpu().clone() if name == "step" else tensor.clone()
                for name, tensor in kept.items()
            }
        optimiser.step()
        return parameter.detach(), dict(optimiser.state[parameter])


@final
@dataclass(frozen=True)
class Momentum(FromTorch):
    r"""SGD with momentum: :math:`m \leftarrow b m + \Delta, \; x \leftarrow x + \eta_g m`."""

    b: float = 0.9

    def __post_init__(self) -> None:
        _check_decay(self.b, "b")

    def make(self, parameters: list[Tensor], step_size: float) -> Optimizer:
        import torch

        return torch.optim.SGD(parameters, lr=step_size, momentum=self.b)


@final
@dataclass(frozen=True)
class Adagrad(FromTorch):
    r"""Adagrad: :math:`v \leftarrow v + \Delta^2, \; x \leftarrow x + \eta_g \Delta / (\sqrt v +
    \epsilon)`, starting with :math:`v = \epsilon^2`.
    """

    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)

    def make(self, parameters: list[Tensor], step_size: float) -> Optimizer:
        import torch

        return torch.optim.Adagrad(
            parameters,
            lr=step_size,
            initial_accumulator_value=self.epsilon**2,
            eps=self.epsilon,
        )


@dataclass(frozen=True)
class _TwoMoments:
    """The parameters of optimisers that keep a mean of the updates and one of their squares."""

    b1: float = 0.9
    b2: float = 0.99
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        _check_decay(self.b1, "b1")
        _check_decay(self.b2, "b2")
        _check_epsilon(self.epsilon)


@final
@dataclass(frozen=True)
class Adam(_TwoMoments, FromTorch):
    r"""Adam with its correction for the first rounds, as torch.optim has it:
    :math:`m \leftarrow b_1 m + (1-b_1) \Delta, \; v \leftarrow b_2 v + (1-b_2) \Delta^2, \;
    x \leftarrow x + \eta_g \hat m / (\sqrt{\hat v} + \epsilon)`.
    """

    def make(self, parameters: list[Tensor], step_size: float) -> Optimizer:
        import torch

        return torch.optim.Adam(
            parameters, lr=step_size, betas=(self.b1, self.b2), eps=self.epsilon
        )


@final
@dataclass(frozen=True)
class Yogi(_TwoMoments, ServerOptimiser):
    r"""Yogi: like Adam, but v moves by a step whose size does not depend on v itself,
    :math:`v \leftarrow v - (1-b_2) \Delta^2 \, \mathrm{sign}(v - \Delta^2)`, starting with
    :math:`m = 0, v = \epsilon^2` and without a correction for the first rounds.
    """

    def step(self, x: Tensor, update: Tensor, step_size: float, kept: Kept) -> tuple[Tensor, Kept]:
        m = kept["m"] if kept else x.new_zeros(x.shape)
        v = kept["v"] if kept else x.new_full(x.shape, self.epsilon**2)
        square = update.square()
        m = self.b1 * m + (1 - self.b1) * update
        v = v - (1 - self.b2) * square * (v - square).sign()
        return x + step_size * m / (v.sqrt() + self.epsilon), {"m": m, "v": v}


def _check_decay(b: float, name: str) -> None:
    if not 0 <= number(b, name) < 1:
        raise FedShuffleError(f"the server's {name} = {b} is outside [0, 1).")


def _check_epsilon(epsilon: float) -> None:
    if not 0 < number(epsilon, "epsilon") < float("inf"):
        raise FedShuffleError(f"the server's epsilon = {epsilon} must be positive.")
