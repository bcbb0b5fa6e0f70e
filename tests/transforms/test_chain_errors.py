"""Mistakes in transforms have one clear error."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshuffle import Federation, FedShuffleError, losses
from fedshuffle.engines import Problem, ReferenceEngine, make
from fedshuffle.errors import TrainingError
from fedshuffle.training.rounds import Run, run_round
from fedshuffle.transforms import ClientContext, Message, ServerContext, Transform
from tests.transforms.examples import MODELS, Everything, Halved, Noise, problem_of


def test_two_memories_do_not_fit() -> None:
    federation = Federation.from_sizes([1, 2])
    with pytest.raises(FedShuffleError, match="both keep a vector"):
        Run(federation, "fedshuffle", transforms=[Everything(), Everything()])
    for name in ("scaffold", "fedlin-sparse"):
        with pytest.raises(FedShuffleError, match=f"{name}.*keeps a vector.*Everything"):
            Run(federation, name, transforms=[Everything()])
    with pytest.raises(FedShuffleError, match="not a Transform"):
        Run(federation, "fedshuffle", transforms=["topk"])  # type: ignore[list-item]


class _Wrong(Transform):
    def __init__(self, message: Any) -> None:
        self.message = message

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        made: Message = self.message(updates)
        return made


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (lambda u: Message(u[:, :1]), "vectors"),
        (lambda u: Message(u.float()), "vectors"),
        (lambda u: Message(u, u), "a state for clients to keep"),
        (lambda u: Message(u, metrics={"clipped": np.ones(7)}), r"\(7,\) values of 'clipped'"),
        (lambda u: u, "a Tensor instead of a Message"),
        (lambda u: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_message_has_a_clear_error(message: Any, named: str) -> None:
    """It names the transform, though it is the first of two, the client and the round."""
    ids = ["ann", "bob", "bob"]
    federation = Federation.from_arrays(torch.randn(3, 6).double(), [0, 1, 2], client_ids=ids)
    problem = Problem(MODELS["linear"]().double(), losses.cross_entropy, federation)
    run = Run(federation, "fedshuffle", transforms=[_Wrong(message), Halved()])
    for engine, who in [("reference", "ann"), ("sequential", "ann"), ("vectorized", "one of bob")]:
        with pytest.raises(
            TrainingError, match=f"round 0, client {who}.*the transform _Wrong.*{named}"
        ):
            run_round(make(engine, problem), [run], [run.start(problem.start)])


def test_an_error_at_the_server_names_the_transform_and_the_round() -> None:
    class Broken(Noise):
        def server(self, update: Tensor, context: ServerContext) -> Any:
            return update

    problem = problem_of("linear")
    run = Run(problem.federation, "fedshuffle", transforms=[Broken()])
    with pytest.raises(FedShuffleError, match="round 0: the transform Broken: ValueError"):
        run_round(ReferenceEngine(problem), [run], [run.start(problem.start)])


def test_numbers_that_a_transform_spoils_are_not_blamed_on_the_step_size() -> None:
    problem = problem_of("linear")
    run = Run(
        problem.federation, "fedshuffle", transforms=[_Wrong(lambda u: Message(u * math.nan))]
    )
    with pytest.raises(FedShuffleError, match=r"round 0.*not finite after the transforms \(_Wrong"):
        run_round(ReferenceEngine(problem), [run], [run.start(problem.start)])
