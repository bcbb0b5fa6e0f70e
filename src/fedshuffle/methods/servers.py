r"""Server optimisers: what the server does with the aggregated update.

The update :math:`\Delta = \sum_{i \in S} a_i (y_i - x)` is minus the server's pseudo-gradient;
:math:`\eta_g` is the server step size.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedshuffle._arrays import number

if TYPE_CHECKING:
    from torch import Tensor

ServerState = Mapping[str, "Tensor"]
"""What a server optimiser keeps between rounds; empty before the first."""


class ServerOptimiser(abc.ABC):
    """Turns the aggregated update into the next model."""

    usual_step_size = 1.0
    """Where to start looking for its step size."""
    adaptive = False
    """Whether the length of the update hardly changes how far the server moves."""
    every_round = False
    """Whether it takes a step, with an update of zero, if nobody takes part."""

    @abc.abstractmethod
    def step(
        self, x: "Tensor", update: "Tensor", step_size: float, state: ServerState
    ) -> "tuple[Tensor, ServerState]":
        """The next model and the next state; no argument is changed."""


@dataclass(frozen=True)
class Average(ServerOptimiser):
    r"""The update itself: :math:`x \leftarrow x + \eta_g \Delta`."""

    def step(
        self, x: "Tensor", update: "Tensor", step_size: float, state: ServerState
    ) -> "tuple[Tensor, ServerState]":
        return x + step_size * update, state


class FromTorch(ServerOptimiser):
    """An optimiser of torch.optim, with minus the update as the gradient."""

    @abc.abstractmethod
    def settings(self) -> tuple[str, dict[str, Any]]:
        """Its name in torch.optim, and its arguments except the step size."""

    def step(
        self, x: "Tensor", update: "Tensor", step_size: float, state: ServerState
    ) -> "tuple[Tensor, ServerState]":
        import torch

        parameter = x.clone().requires_grad_()
        parameter.grad = -update
        name, arguments = self.settings()
        optimiser = getattr(torch.optim, name)([parameter], lr=step_size, **arguments)
        if state:  # torch counts steps on the CPU
            optimiser.state[parameter] = {
                name: tensor.cpu().clone() if name == "step" else tensor.clone()
                for name, tensor in state.items()
            }
        optimiser.step()
        return parameter.detach(), dict(optimiser.state[parameter])


@dataclass(frozen=True)
class Momentum(FromTorch):
    r"""SGD with momentum: :math:`m \leftarrow b m + \Delta, \; x \leftarrow x + \eta_g m`, or with
    Nesterov's :math:`x \leftarrow x + \eta_g (\Delta + b m)`.
    """

    b: float = 0.9
    nesterov: bool = False
    usual_step_size = 0.1

    def __post_init__(self) -> None:
        number(self.b, "the server's b", within="[0, 1)")

    def settings(self) -> tuple[str, dict[str, Any]]:
        return "SGD", {"momentum": self.b, "nesterov": self.nesterov and self.b > 0}


@dataclass(frozen=True)
class Adagrad(FromTorch):
    r"""Adagrad: :math:`v \leftarrow v + \Delta^2, \; x \leftarrow x + \eta_g \Delta / (\sqrt v +
    \epsilon)`, starting with :math:`v = \epsilon^2`.
    """

    epsilon: float = 1e-3
    usual_step_size, adaptive = 0.01, True

    def __post_init__(self) -> None:
        number(self.epsilon, "the server's epsilon", within="(0, inf)")

    def settings(self) -> tuple[str, dict[str, Any]]:
        return "Adagrad", {"initial_accumulator_value": self.epsilon**2, "eps": self.epsilon}


@dataclass(frozen=True)
class _TwoMoments:
    """Parameters of optimisers that keep a mean of the updates and one of their squares."""

    b1: float = 0.9
    b2: float = 0.99
    epsilon: float = 1e-3
    usual_step_size, adaptive = 0.01, True

    def __post_init__(self) -> None:
        number(self.b1, "the server's b1", within="[0, 1)")
        number(self.b2, "the server's b2", within="[0, 1)")
        number(self.epsilon, "the server's epsilon", within="(0, inf)")


@dataclass(frozen=True)
class Adam(_TwoMoments, FromTorch):
    r"""Adam with its correction for the first rounds, as in torch.optim:
    :math:`m \leftarrow b_1 m + (1-b_1) \Delta, \; v \leftarrow b_2 v + (1-b_2) \Delta^2, \;
    x \leftarrow x + \eta_g \hat m / (\sqrt{\hat v} + \epsilon)`.
    """

    def settings(self) -> tuple[str, dict[str, Any]]:
        return "Adam", {"betas": (self.b1, self.b2), "eps": self.epsilon}


@dataclass(frozen=True)
class Yogi(_TwoMoments, ServerOptimiser):
    r"""Yogi: like Adam, but the size of v's step does not depend on v itself,
    :math:`v \leftarrow v - (1-b_2) \Delta^2 \, \mathrm{sign}(v - \Delta^2)`, starting with
    :math:`m = 0, v = \epsilon^2` and without a correction for the first rounds.
    """

    def step(
        self, x: "Tensor", update: "Tensor", step_size: float, state: ServerState
    ) -> "tuple[Tensor, ServerState]":
        m = state["m"] if state else x.new_zeros(x.shape)
        v = state["v"] if state else x.new_full(x.shape, self.epsilon**2)
        square = update.square()
        m = self.b1 * m + (1 - self.b1) * update
        v = v - (1 - self.b2) * square * (v - square).sign()
        return x + step_size * m / (v.sqrt() + self.epsilon), {"m": m, "v": v}
