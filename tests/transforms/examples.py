"""Small transforms and problems for the tests of the chain."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle import losses
from fedshuffle.engines import Problem
from fedshuffle.transforms import ClientContext, Message, ServerContext, Transform
from fedshuffle.transforms.base import MeanUpdate
from tests.engines.models import SIZES, data

NEAR: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}


@dataclass(frozen=True)
class Everything(Transform):
    """Uses all that a transform may: order, chance, state, gradients, server state, metrics."""

    keeps_state = True

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        assert state is not None
        assert context.full_gradients is not None
        signs = [rng.choice([-1.0, 1.0], size=updates.shape[1]) for rng in context.generators()]
        ramp = torch.linspace(0.5, 1.5, updates.shape[1], dtype=updates.dtype)
        length = updates.new_tensor(context.steps * context.step_sizes * context.weights)
        sent = updates * ramp + 0.1 * updates.new_tensor(np.stack(signs)) + 0.5 * state
        sent += context.shared.get("mean", 0.0) + 0.01 * context.full_gradients()
        new = state + updates * length[:, None]
        sizes = context.clients.astype(np.float64) + 7
        return Message(sent, new, {"bytes_up": sizes, "first": sent[:, 0]})

    def server(self, update: Tensor, context: ServerContext) -> tuple[Tensor, Mapping[str, Tensor]]:
        noise = context.generator().normal(size=len(update))
        mean = 0.1 * update * float(context.metrics["first"].mean())
        return update + 1e-3 * update.new_tensor(noise), {"mean": mean}


class Halved(Transform):
    any_layout = True
    mean: MeanUpdate = "biased"

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return Message(updates.mul_(0.5))


@dataclass(frozen=True)
class Noise(Transform):
    """Gaussian noise at the server in every round."""

    every_round: bool = True
    mean = "unbiased"
    server_only = True

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return Message(updates)

    def server(self, update: Tensor, context: ServerContext) -> tuple[Tensor, Mapping[str, Tensor]]:
        noise = context.generator().normal(size=len(update))
        return update + update.new_tensor(noise), {}


class Scaled(Transform):
    """Scales without touching the vectors."""

    any_layout = True
    mean: MeanUpdate = "biased"

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return Message(updates, factors=1.0 / (2 + context.clients))


MODELS: dict[str, Any] = {
    "linear": lambda: nn.Linear(6, 3),  # by hand, with transposed weights
    "mlp": lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)),
    "autograd": lambda: nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 3)),
}


def problem_of(model: str) -> Problem:
    torch.manual_seed(0)
    return Problem(MODELS[model]().double(), losses.cross_entropy, data((6,), 3, SIZES))
