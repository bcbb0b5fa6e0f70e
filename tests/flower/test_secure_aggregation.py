"""Secure aggregation with Flower's SecAgg+: sums, precision, ranges, clients that drop out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from torch import Tensor

from fedshuffle import losses
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import Client, FedShuffleStrategy, SecureAggregation, protocol
from fedshuffle.flower.chain import register
from fedshuffle.flower.secure_aggregation import LEVELS, MODULUS
from fedshuffle.transforms import ClientContext, ServerContext, Transform, channel
from fedshuffle.transforms import Message as Sent
from tests.flower.grid import Fault, LocalGrid
from tests.flower.helpers import (
    Shorten,
    apps,
    model,
    own,
    simulated,
    start,
    strategy,
    warnings,
    when_training,
)

pytestmark = pytest.mark.usefixtures("server_process")


@register
@dataclass(frozen=True)
class Counted(Transform):
    """Counts shortened updates at the server."""

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Sent:
        return Sent(updates)

    def server(self, update: Tensor, context: ServerContext) -> tuple[Tensor, Mapping[str, Tensor]]:
        before = context.state.get("clipped", torch.zeros(()))
        return update, {"clipped": before + float(context.metrics["clipped"].sum())}


STAGES = ["setup", "share_keys", "collect_masked_vectors", "unmask"]


def secure(clipping_range: float = 8.0, **options: Any) -> FedShuffleStrategy:
    settings = SecureAggregation(clipping_range, **options.pop("settings", {}))
    return strategy(secure_aggregation=settings, **{"sampling": "uniform:3"} | options)


def grid(fault: Fault | None = None) -> LocalGrid:
    return LocalGrid(apps(secure_aggregation=True), fault)


def stage(message: Message) -> str:
    record = message.content.config_records.get("secaggplus_configs", {})
    return str(record.get("stage", ""))


def drops(client: int, when: str) -> Fault:
    return lambda asked, message: "raises" if (asked, stage(message)) == (client, when) else None


def difference(arrays: ArrayRecord, other: torch.nn.Module | ArrayRecord) -> float:
    found = arrays.to_torch_state_dict()
    state = other.to_torch_state_dict() if isinstance(other, ArrayRecord) else other.state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in state.items())


@pytest.mark.parametrize(
    "options",
    [{}, {"method": "fedprox+fedshuffle", "server_step_size": 1.5}, {"sizes": "withheld"}],
)
def test_sum_is_that_of_plain_aggregation(options: dict[str, Any]) -> None:
    plain = strategy(sampling="uniform:3", **options).start(LocalGrid(apps()), start(), 1)
    masked = secure(**options).start(grid(), start(), 1)
    assert masked.train_metrics_clientapp[1]["replied"] == 3
    assert difference(masked.arrays, plain.arrays) < 1e-6
    assert difference(plain.arrays, start()) > 1e-3


def test_transforms_of_the_clients_come_before_the_masks() -> None:
    """Also their numbers reach the server's part, here the count of shortened updates."""
    transforms = [Shorten(0.05), Counted()]
    plain = strategy(sampling="uniform:3", transforms=transforms)
    expected = plain.start(LocalGrid(apps()), start(), 2)
    ours = secure(transforms=transforms)
    assert difference(ours.start(grid(), start(), 2).arrays, expected.arrays) < 1e-6
    assert ours._session is not None
    assert ours._session.state.transform_state["1.clipped"] == 2 * 3
    assert "train_loss" not in ours._session.state.metrics


def test_rounds_follow_the_simulator_to_rounding() -> None:
    result = secure().start(grid(), start(), 3)
    assert difference(result.arrays, simulated(3, sampling="uniform:3")) < 1e-6


def test_error_is_that_of_stochastic_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps so coarse that they are seen: mean zero, at most one step per client."""
    monkeypatch.setattr("fedshuffle.flower.secure_aggregation.LEVELS", 2**12)
    # Flower rounds by NumPy's global generator.
    monkeypatch.setattr(np.random, "rand", np.random.RandomState(0).rand)
    plain = strategy(sampling="full").start(LocalGrid(apps()), start(), 1)
    names = list(plain.arrays)
    errors = []
    for _ in range(10):
        masked = secure(sampling="full").start(grid(), start(), 1).arrays
        errors.append(
            np.concatenate([(masked[n].numpy() - plain.arrays[n].numpy()).ravel() for n in names])
        )
    step, clients = 2 * 8.0 / 2**12, 4
    values = np.stack(errors)
    assert np.abs(values).max() <= clients * step
    assert np.abs(values).max() > step / 2
    largest_deviation = np.sqrt(clients) * step / 2
    assert values.std() <= largest_deviation
    assert abs(values.mean()) < 4 * largest_deviation / np.sqrt(values.size)


def test_server_sees_no_update() -> None:
    """Replies hold masked integers of the whole range, and no other arrays."""
    used = grid()
    secure().start(used, start(), 1)
    contents = [message.content for message in used.received]
    masked = [c["secaggplus_configs"]["masked_params"] for c in contents if c.metric_records]
    assert len(masked) == 3
    for _, update in masked:
        values = Array("int64", (), "numpy.ndarray", update).numpy()
        assert values.dtype == np.int64
        assert values.max() > MODULUS / 2 > values.min()
    assert not any(len(record) for c in contents for record in c.array_records.values())


def test_metrics_that_are_not_asked_for_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is in the sum already, and what it says of its update is not masked."""
    monkeypatch.setattr("fedshuffle.flower.client._OBSERVED", ())
    with pytest.raises(FedShuffleError, match=r"client \d breaks secure.*train_loss.* instead of"):
        secure().start(grid(), start(), 1)


@pytest.mark.parametrize("when", STAGES[2:])
def test_client_may_drop_out_once_keys_are_shared(when: str, log: pytest.LogCaptureFixture) -> None:
    """The sum is that of the clients whose masked updates came."""
    lost = when_training("raises", only=1) if when != "unmask" else None
    expected = strategy(sampling="full").start(LocalGrid(apps(), lost), start(), 1)
    result = secure(sampling="full").start(grid(drops(1, when)), start(), 1)
    assert difference(result.arrays, expected.arrays) < 1e-6
    replied = 4 if when == "unmask" else 3
    assert result.train_metrics_clientapp[1]["replied"] == replied
    assert ("client 1 failed: the client failed" in warnings(log)) == (when != "unmask")


@pytest.mark.parametrize("when", STAGES[:2])
def test_flower_loses_the_round_if_a_client_drops_out_before(
    when: str, log: pytest.LogCaptureFixture
) -> None:
    """Why response probabilities are refused. If a new version of Flower passes, allow them."""
    result = secure(sampling="full").start(grid(drops(1, when)), start(), 1)
    assert difference(result.arrays, start()) == 0
    assert result.train_metrics_clientapp[1]["replied"] == 0
    assert "client 1 failed: the client failed" in warnings(log)
    assert "client 2 was lost with the round" in warnings(log)


def test_lost_rounds_end_the_run() -> None:
    broken = grid(lambda client, message: "raises" if stage(message) else None)
    with pytest.raises(FedShuffleError, match="no client replied in 3 rounds"):
        secure().start(broken, start(), 5)


def test_update_out_of_range_is_not_clipped(log: pytest.LogCaptureFixture) -> None:
    secure(1e-4).start(grid(), start(), 1)
    assert "outside the range 0.0001" in warnings(log)


def test_flower_clips_what_is_out_of_range() -> None:
    """Why our clients check the range themselves."""
    (found,) = dequantize(quantize([np.array([-20.0, 0.5, 20.0])], 8.0, LEVELS), 8.0, LEVELS)
    np.testing.assert_allclose(found, [-8, 0.5, 8], atol=2e-8)


def test_flower_overflows_if_steps_times_clients_reach_the_modulus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why the modulus is so large; Flower's own would do for fewer than 1024 clients."""
    monkeypatch.setattr("fedshuffle.flower.secure_aggregation.MODULUS", 4 * LEVELS)
    secure().start(grid(), start(), 1)
    with pytest.raises(RuntimeWarning, match="divide by zero"):
        secure(sampling="full").start(grid(), start(), 1)


def test_flower_draws_masks_from_32_bits() -> None:
    """A limit of Flower's masks that docs/how-to/security.md states: halves of a seed cancel."""
    rng = np.random.default_rng(0)
    key, other = (rng.integers(0, 2**32, 8, dtype=np.uint32) for _ in range(2))
    other[-1] ^= np.bitwise_xor.reduce(key) ^ np.bitwise_xor.reduce(other)
    assert (key != other).all()
    (one,), (two,) = (pseudo_rand_gen(k.tobytes(), MODULUS, [(1000,)]) for k in (key, other))
    assert (one == two).all()


def test_both_sides_must_ask_for_it() -> None:
    with pytest.raises(FedShuffleError, match="do not agree"):
        strategy().start(grid(), start(), 1)
    with pytest.raises(FedShuffleError, match="do not agree"):
        secure().start(LocalGrid(apps()), start(), 1)
    mixed = [*apps(secure_aggregation=True)[:3], *apps()[:1]]
    with pytest.raises(FedShuffleError, match="do not agree"):
        secure(timeout=1.0).start(LocalGrid(mixed), start(), 1)


@pytest.mark.parametrize("kind", [protocol.TRAIN, protocol.FULL_GRADIENT])
def test_client_sends_nothing_unmasked(kind: str) -> None:
    app = apps(secure_aggregation=True)[0]
    with pytest.raises(FedShuffleError, match="only with secure aggregation"):
        app(
            Message(RecordDict(), 100, kind, ttl=9.0),
            Context(1, 0, {"partition-id": 0}, RecordDict(), {}),
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "fedavg"}, "divides by a sum"),
        ({"method": "fedshuffle-mvr"}, "more than the sum"),
        ({"method": "scaffold"}, "scaffold"),
        ({"transforms": [channel("float16")]}, "float16"),
        ({"retries": 1}, "no retries"),
        ({"response_probability": 0.9}, "loses the whole round"),
        ({"settings": {"num_shares": 2}}, "num_shares"),
        ({"settings": {"reconstruction_threshold": 1.5}}, "reconstruction_threshold"),
        ({"clipping_range": 0.0}, "clipping_range"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FedShuffleError, match=said):
        secure(**options)


def test_clients_must_finish_their_steps() -> None:
    with pytest.raises(FedShuffleError, match="seconds"):
        Client(0, model(), own(0), losses.cross_entropy, seconds=1.0, secure_aggregation=True)
