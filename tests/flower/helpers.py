"""A small problem with its clients and strategy; messages are really encoded, but not sent."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedshuffle import Federation, LocalWork, losses, train
from fedshuffle.flower import FedShuffleStrategy, client_app, protocol
from fedshuffle.flower.chain import register
from fedshuffle.transforms import ClientContext, Transform
from fedshuffle.transforms import Message as Sent
from tests.flower.grid import Fault

SIZES = [3, 7, 12, 5]
WORK = LocalWork(epochs=2, batch_size=2, weight_decay=0.01)
FEDERATION = Federation.from_arrays(
    torch.from_numpy(np.random.default_rng(0).normal(size=(27, 4)).astype(np.float32)),
    torch.arange(27) % 3,
    sizes=SIZES,
)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3))


def own(client: int) -> tuple[Tensor, ...]:
    first, last = FEDERATION.offsets[client : client + 2]
    return tuple(field[first:last] for field in FEDERATION.tensors())


def data(context: Context) -> tuple[Tensor, ...]:
    return own(int(context.node_config["partition-id"]))


def apps(**options: Any) -> list[ClientApp]:
    return [client_app(model, data, losses.cross_entropy, **options)] * len(SIZES)


def start() -> ArrayRecord:
    return ArrayRecord(model().state_dict())


def simulated(
    rounds: int = 4,
    federation: Federation = FEDERATION,
    make: Callable[[], nn.Module] = model,
    **options: Any,
) -> nn.Module:
    options = {"method": "fedshuffle", "sampling": "uniform:2", "work": WORK, "seed": 3} | options
    options = {"step_size": 0.05} | options
    return train(make(), federation, loss=losses.cross_entropy, rounds=rounds, **options).model


def strategy(**options: Any) -> FedShuffleStrategy:
    options = {"method": "fedshuffle", "sampling": "uniform:2", "work": WORK, "seed": 3} | options
    options = {"clients": len(SIZES), "step_size": 0.05} | options
    return FedShuffleStrategy(**options)


def same(arrays: ArrayRecord, other: nn.Module) -> bool:
    """Bit for bit."""
    found = arrays.to_torch_state_dict()
    return all(torch.equal(found[name], value) for name, value in other.state_dict().items())


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


def trains(message: Message) -> bool:
    return bool(message.metadata.message_type == protocol.TRAIN)


def when_training(fault: str, only: int | None = None) -> Fault:
    """A fault in the local training of all clients, or of one only."""
    return lambda client, message: fault if trains(message) and only in (None, client) else None


def change(content: RecordDict, **fields: object) -> None:
    """Change fields of an encoded message."""
    record = content.config_records["fedshuffle"]
    record["payload"] = json.dumps(json.loads(str(record["payload"])) | fields)


@register
@dataclass(frozen=True)
class Shorten(Transform):
    """Scales updates to a largest norm, as clipping does."""

    most: float
    any_layout = True

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Sent:
        norms = updates.norm(dim=1)
        return Sent(
            updates.mul_((self.most / norms).clamp_max(1.0)[:, None]),
            metrics={"clipped": (norms > self.most).to(norms.dtype)},
        )
