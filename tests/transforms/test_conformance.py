"""The conformance suite for transforms finds planted bugs."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedshuffle import methods
from fedshuffle.testing import check_transform
from fedshuffle.transforms import ClientContext, Message, ServerContext, Transform
from fedshuffle.transforms.base import MeanUpdate
from tests.transforms.examples import Everything, Halved, Noise, Scaled


@pytest.mark.parametrize("transform", [Everything(), Halved(), Noise(), Scaled()])
def test_these_transforms_conform(transform: Transform) -> None:
    report = check_transform(transform)
    assert report.passed, str(report)


class Mixing(Halved):
    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return Message(updates - updates.mean(0))


class Ordered(Halved):
    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return Message(updates * torch.arange(updates.shape[1]).to(updates))


class Unstated(Halved):
    mean: MeanUpdate = "unbiased"


class Forgetful(Everything):
    mean: MeanUpdate = "restored"

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return Message(0.5 * updates, torch.zeros_like(updates))


class Overwriting(Everything):
    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        assert state is not None
        return Message(updates, state.add_(updates))


class Global(Halved):
    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return Message(updates * torch.rand(1).to(updates))


class Narrow(Halved):
    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return Message(updates.float())


@dataclass(frozen=True)
class Counting(Noise):
    """Overwrites what it keeps at the server, which does not show in the sum."""

    def server(self, update: Tensor, context: ServerContext) -> tuple[Tensor, Mapping[str, Tensor]]:
        count = context.state.get("count", torch.zeros(()))
        return update, {"count": count.add_(1)}


@dataclass(frozen=True)
class Doubling(Noise):
    def server(self, update: Tensor, context: ServerContext) -> tuple[Tensor, Mapping[str, Tensor]]:
        update, state = super().server(update, context)
        return 2 * update, state


class DoublingExactly(Doubling):
    mean = "unchanged"  # type: ignore[assignment]


class Clock(Halved):
    """A metric that another run does not have."""

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return Message(updates, metrics={"luck": torch.rand(len(updates))})


@pytest.mark.parametrize(
    ("planted", "check"),
    [
        (Counting(), "purity"),
        (Doubling(), "mean"),
        (DoublingExactly(), "mean"),
        (Clock(), "purity"),
        (Mixing(), "rows"),
        (Ordered(), "layout"),
        (Unstated(), "mean"),
        (Forgetful(), "mean"),
        (Overwriting(), "purity"),
        (Global(), "purity"),
        (Narrow(), "shapes"),
    ],
)
def test_planted_bugs_are_found(planted: Transform, check: str) -> None:
    assert check in [result.check for result in check_transform(planted).failures]


def test_methods_own_bookkeeping_conforms() -> None:
    from fedshuffle.methods.scaffold import Refresh

    for refresh in ("update", "gradient"):
        report = check_transform(Refresh(torch.zeros(6, dtype=torch.float64), refresh))
        broken = {result.check for result in report.failures}
        assert broken <= {"shapes", "engines"}, str(report)  # its c has the size of one model
    assert methods.get("scaffold").direction.client_state
