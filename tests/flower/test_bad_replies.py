"""Clients whose replies cannot be used: an error before work is lost, a warning afterwards."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.typing import ClientAppCallable

from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import ConsistentFedAvg, ConsistentFedBuff
from tests.flower.grid import LocalGrid
from tests.flower.helpers import warnings
from tests.flower.test_consistent_fedavg import LR, grid, model, shares, start, trained

pytestmark = pytest.mark.usefixtures("server_process")

Spoil = Callable[[RecordDict], None]


def spoilt(spoil: Spoil, from_round: int = 1, only: int | None = 1) -> LocalGrid:
    """Clients, of which one, or each, spoils its replies from some round on."""

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        mine = only in (None, context.node_config["partition-id"])
        late = message.content["config"]["server-round"] >= from_round
        if mine and late and message.metadata.message_type == "train":
            spoil(reply.content)
        return reply

    return grid(mods=[mod])


def sends(array: Array) -> Spoil:
    return lambda content: content.update(arrays=ArrayRecord({"w": array}))


def reports(**metrics: float) -> Spoil:
    named = {name.replace("_", "-"): value for name, value in metrics.items()}
    return lambda content: content["metrics"].update(named)


def drop_steps(content: RecordDict) -> None:
    del content["metrics"]["num-steps"]


TEXT = Array("float64", (3,), "numpy.ndarray", b"no array")
SHORT = Array(np.ones(1))
ONE_FOR_THREE = Array("float64", (3,), "numpy.ndarray", SHORT.data)
"""It would be broadcast."""

WRONG = {
    "unreadable": (sends(TEXT), "'w' of node 101 cannot be read.*Send numpy arrays of numbers"),
    "short": (sends(ONE_FOR_THREE), r"it is said to be .*\(3,\).* and is .*\(1,\)"),
    "of text": (sends(Array(np.array(["a", "b", "c"]))), "is of type <U1.*real numbers"),
    "complex": (sends(Array(np.ones(3, complex))), "is of type complex128.*real numbers"),
    "of another shape": (sends(Array(np.zeros(4))), r"'w' of shape \(4,\)"),
    "too many steps": (reports(num_steps=1e30), "reports 1e.30 as 'num-steps': a number from 1"),
    "no step": (reports(num_steps=1e-300), "reports 1e-300 as 'num-steps': a number from 1"),
    "no examples": (reports(num_examples=0), "reports 0 as 'num-examples'"),
    "silent on steps": (drop_steps, "does not report 'num-steps'"),
}
"""What a wrong program replies, and what is said of it."""


def run(strategy: Any, on: LocalGrid, rounds: int) -> Any:
    return strategy.start(on, start(), rounds, train_config=ConfigRecord({"lr": LR}))


STRATEGIES = [ConsistentFedAvg, lambda: ConsistentFedBuff("fedbuff:K=3")]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("spoil", "says"), WRONG.values(), ids=WRONG)
def test_wrong_program_ends_the_run_before_anybody_has_trained(
    spoil: Spoil, says: str, strategy: Any
) -> None:
    says = says.replace("101", "10[01]")
    with pytest.raises(FedShuffleError, match=says):
        run(strategy(), spoilt(spoil, only=None), 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("spoil", "says"), WRONG.values(), ids=WRONG)
def test_later_it_is_left_out(
    spoil: Spoil, says: str, strategy: Any, log: pytest.LogCaptureFixture
) -> None:
    found = run(strategy(), spoilt(spoil, from_round=2), 3).arrays["w"].numpy()
    once = run(strategy(), grid(), 1).arrays["w"].numpy()
    assert found[1] == once[1]
    assert (found[[0, 2]] > once[[0, 2]]).all()
    assert "node 101 failed" in warnings(log)


def test_wrong_program_in_a_resumed_run_is_an_error() -> None:
    first, resumed = ConsistentFedAvg(), ConsistentFedAvg()
    trained(first, grid())
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(FedShuffleError, match="does not report 'num-steps'"):
        trained(resumed, spoilt(drop_steps))


@pytest.mark.parametrize("estimate", [None, "estimate"])
def test_node_counts_once_and_only_if_it_was_there(
    estimate: str | None, log: pytest.LogCaptureFixture
) -> None:
    ours, here = ConsistentFedAvg(response_probability=estimate), grid([8] * 3)
    messages = ours.configure_train(1, start(), ConfigRecord({"lr": LR}), here)
    replies = here.send_and_receive(messages)
    stranger = Message(replies[0].content, dst_node_id=999, message_type="train")
    foreign = Message(replies[0].content, reply_to=stranger)
    after, _ = ours.aggregate_train(1, [*replies, replies[0], foreign])
    assert after is not None
    assert shares(after["w"].numpy()) == pytest.approx([1 / 3] * 3)
    for node in (100, 999):
        assert f"node {node} failed: it replies twice, or is not connected" in warnings(log)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({}, r"initial_arrays are empty: give ArrayRecord\(model.state_dict"),
        ({"w": np.full(3, np.nan)}, "'w' of initial_arrays is not finite"),
        ({"w": np.ones(3, complex)}, "'w' of initial_arrays is of type complex128"),
    ],
)
def test_model_that_cannot_be_trained_is_refused_before_anybody_is_asked(
    arrays: dict[str, Any], says: str, strategy: Any
) -> None:
    here = grid()
    given = ArrayRecord({name: Array(value) for name, value in arrays.items()})
    with pytest.raises(FedShuffleError, match=says):
        strategy().start(here, given, 1)
    assert here.asked == []


def test_secure_aggregation_of_the_client_gets_the_remedy() -> None:
    with pytest.raises(FedShuffleError, match=r"secaggplus_mod hides .*FedShuffleStrategy"):
        trained(ConsistentFedAvg(), grid(mods=[secaggplus_mod]))


@pytest.mark.parametrize("step_size", [0.0, "fast"])
def test_scaled_step_sizes_need_a_positive_number(step_size: Any) -> None:
    here = grid()
    with pytest.raises(FedShuffleError, match=r"'lr' of train_config is .* but must be"):
        trained(ConsistentFedAvg(step_sizes="scaled"), here, lr=step_size)
    assert here.asked == []


def test_somebody_is_always_sampled() -> None:
    ours = ConsistentFedAvg(fraction_train=0.1, min_train_nodes=0)
    assert np.count_nonzero(model(ours, grid())) == 1
