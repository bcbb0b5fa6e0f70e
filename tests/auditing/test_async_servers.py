"""The audit of asynchronous servers: closed forms, servers with known faults, and the adapters."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedshuffle import Federation, FedShuffleError
from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.async_adapters import appfl_server, flsim_server, nvflare_server
from fedshuffle.auditing.async_servers import MakeServer, audit_async_server, staleness_weights

RATES = np.array([4.0, 2.0, 1.0, 0.5])
ALIKE = Federation.from_sizes([1, 1, 1, 1])


class Buffered:
    """FedBuff with staleness weights ``(1 + s)^-a``; FedAsync of updates if K = 1."""

    def __init__(self, parameters: int, a: float = 0.0, buffer: int = 1, scale: Any = 1.0) -> None:
        self.model, self.made, self.a, self.buffer = np.zeros(parameters), 0, a, buffer
        self.scale = np.broadcast_to(scale, parameters)
        self.started: dict[int, tuple[int, FloatArray]] = {}
        self.waiting: list[FloatArray] = []

    def download(self, client: int) -> FloatArray:
        self.started[client] = self.made, self.model
        return self.model

    def weighted(self, client: int, update: FloatArray) -> FloatArray:
        weight = (1 + self.made - self.started[client][0]) ** -self.a
        weighted: FloatArray = self.scale[client] * weight * update
        return weighted

    def upload(self, client: int, update: FloatArray) -> None:
        self.waiting.append(self.weighted(client, update))
        if len(self.waiting) == self.buffer:
            self.model, self.waiting = self.model + sum(self.waiting), []
            self.made += 1


class Mixing(Buffered):
    """Moves by a share of the way to the client's model."""

    share = 0.5

    def weighted(self, client: int, update: FloatArray) -> FloatArray:
        return self.share * (self.started[client][1] + update - self.model)


class Forgetful(Buffered):
    """Drops what is stale by more than four models, so shorter scripts show nothing."""

    def weighted(self, client: int, update: FloatArray) -> FloatArray:
        return update * (self.made - self.started[client][0] <= 4)


def mean_weights(a: float) -> FloatArray:
    """``E[(1 + s)^-a]`` of looping clients, s geometric."""
    p = (RATES / RATES.sum())[:, None]
    s = np.arange(3000)
    mean: FloatArray = (p * (1 - p) ** s * (1.0 + s) ** -a).sum(axis=1)
    return mean


def closed_form(a: float) -> FloatArray:
    raw = RATES * mean_weights(a)
    shares: FloatArray = raw / raw.sum()
    return shares


def test_closed_forms_are_those_of_the_issue() -> None:
    assert closed_form(0.0).round(3).tolist() == [0.533, 0.267, 0.133, 0.067]
    assert closed_form(0.5).round(3).tolist() == [0.624, 0.246, 0.095, 0.036]


def test_without_staleness_weights_clients_count_by_rate() -> None:
    result = audit_async_server(Buffered, ALIKE, RATES, uploads=500)
    np.testing.assert_allclose(result.effective_weights, closed_form(0.0), rtol=1e-9)
    assert result.exact
    assert result.consistent is False
    assert [f.what for f in result.findings] == ["Client 0 uploads 8 times as often as client 3."]
    assert "all alike" in result.facts()[1]
    same = audit_async_server(Buffered, ALIKE, np.ones(4), uploads=500)
    assert same.consistent
    assert not same.findings


def test_intervals_cover_the_closed_form() -> None:
    def make(parameters: int) -> Buffered:
        return Buffered(parameters, a=0.5)

    inside = []
    for seed in range(30):
        result = audit_async_server(make, ALIKE, RATES, uploads=1600, seed=seed)
        assert result.intervals is not None
        low, high = result.intervals.T
        inside.append((low <= closed_form(0.5)) & (closed_form(0.5) <= high))
    assert 0.88 <= np.mean(inside) < 1
    assert [f.what for f in result.findings][1].startswith("An update counts 0.707 times")


def test_dividing_by_rate_times_mean_staleness_weight_repairs() -> None:
    scale = np.append(1 / (RATES * mean_weights(0.5)), 0.0)
    result = audit_async_server(lambda n: Buffered(n, 0.5, scale=scale), ALIKE, RATES, uploads=4000)
    assert result.consistent is None
    assert result.total_variation < 0.02
    assert not result.findings


def test_sizes_and_the_buffer_are_seen() -> None:
    sizes = Federation.from_sizes([1, 2, 3, 4])
    result = audit_async_server(lambda n: Buffered(n, buffer=3), sizes, np.ones(4), uploads=640)
    assert result.how == "640 uploads, 3 for each model"
    assert [f.what for f in result.findings] == [
        "The server ignores how many examples clients have."
    ]
    scale = [1, 2, 3, 4, 0]
    by_size = audit_async_server(lambda n: Buffered(n, scale=scale), sizes, np.ones(4), uploads=640)
    assert by_size.consistent
    assert by_size.properties.form == "by size"


def test_mixing_with_models_undoes_work_but_keeps_the_rates() -> None:
    result = audit_async_server(Mixing, ALIKE, RATES, uploads=4000)
    assert result.standard_errors is not None
    apart = np.abs(result.effective_weights - closed_form(0.0))
    assert (apart < 5 * result.standard_errors).all()
    assert "undoes 50%" in result.findings[-1].what
    np.testing.assert_allclose(staleness_weights(Mixing), 0.5)


def test_lost_updates_are_found() -> None:
    result = audit_async_server(Forgetful, ALIKE, RATES, uploads=2000)
    assert "An update of client 3 counts" in result.findings[1].what
    kept = 1 - (1 - RATES / RATES.sum()) ** 5
    expected = RATES * kept / (RATES @ kept)
    assert result.standard_errors is not None
    assert (np.abs(result.effective_weights - expected) < 5 * result.standard_errors).all()


def test_a_server_that_is_not_linear() -> None:
    class Signs(Buffered):
        def weighted(self, client: int, update: FloatArray) -> FloatArray:
            return np.tanh(update)

    result = audit_async_server(Signs, ALIKE, RATES, uploads=500)
    np.testing.assert_allclose(result.effective_weights, closed_form(0.0), rtol=1e-3)
    assert result.properties.linear is False


class Apart(Mixing):
    share = 1.0


class Overshooting(Mixing):
    share = 3.0


class Still(Buffered):
    def weighted(self, client: int, update: FloatArray) -> FloatArray:
        return 0 * update


class WrongShape(Buffered):
    def download(self, client: int) -> FloatArray:
        return super().download(client)[:2]


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (Apart, {}, "Apart replaces its model by the one that arrives"),
        (lambda n: Overshooting(n), {"name": "it"}, "it diverges: "),
        (Still, {}, "Still has not moved after 4096 uploads"),
        (WrongShape, {}, "a model of shape .2,.: make one with .* here 5"),
        (Buffered, {"uploads": 9}, "9 uploads are too few"),
        (Buffered, {"rates": [1, 2]}, "rates must be one number for each of the 4 clients"),
        (Buffered, {"rates": [1, 2, 3, 0]}, "rates: client 3 has 0"),
    ],
)
def test_what_cannot_be_audited(make: MakeServer, more: dict[str, Any], message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        audit_async_server(make, ALIKE, **{"rates": RATES, "uploads": 640, **more})


class APPFL:
    """An aggregator with APPFL's interface."""

    def __init__(self, model: torch.nn.Module, **configs: Any) -> None:
        self.aggregator_configs = configs
        self._state = dict(model.named_parameters())["x"].detach().clone()

    def get_parameters(self, client_id: int) -> dict[str, torch.Tensor]:
        return {"x": self._state}

    def aggregate(self, client_id: int, sent: dict[str, torch.Tensor], *, staleness: int) -> None:
        weight = 0.5 * (1 + staleness) ** -0.5
        gradient = self.aggregator_configs.get("gradient_based", False)
        self._state = self._state + weight * (-sent["x"] if gradient else sent["x"] - self._state)


@pytest.mark.parametrize("gradient_based", [True, False])
def test_appfl(gradient_based: bool) -> None:
    make = appfl_server(lambda model: APPFL(model, gradient_based=gradient_based))
    np.testing.assert_allclose(staleness_weights(make), 0.5 * np.arange(1, 6) ** -0.5)
    result = audit_async_server(make, ALIKE, RATES, uploads=320)
    assert any("undoes" in finding.what for finding in result.findings) is not gradient_based


class FLSim:
    """A trainer with FLSim's interface; its server moves against the clients' deltas."""

    def __init__(self, model: Any) -> None:
        self.model, self.seqnum = model, 0

    def _global_update_done(self) -> None:
        raise AssertionError("there are no metrics to report")

    def on_training_start(self, client: Any) -> None:
        client.training_started(model_seqnum=self.seqnum, init_model=self.model)

    def train_and_update_global_model(self, client: Any) -> None:
        assert client.local_model is self.model
        delta, final, examples = client.train_local_model(None)
        moved = final.fl_get_module().x - client.start
        torch.testing.assert_close(moved, -delta.fl_get_module().x)
        weight = examples * (1 + self.seqnum - client.model_seqnum) ** -0.5
        self.model.fl_get_module().x.data -= weight * delta.fl_get_module().x.data
        self.seqnum += 1
        self._global_update_done()


def test_flsim() -> None:
    make = flsim_server(FLSim, sizes=[2, 3])
    np.testing.assert_allclose(staleness_weights(make, 2), 2 * np.arange(1, 6) ** -0.5)


def test_nvflare(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins that have the interface of NVFlare's classes."""

    class Message(SimpleNamespace):
        def __init__(self, *given: Any, data: Any = None) -> None:
            super().__init__(given=given, data=data)

        def to_shareable(self) -> "Message":
            return self

    class Devices:
        def __init__(self, size: int) -> None:
            self.current_selection: dict[str, int] = {}

    class Assessor:
        model_manager: Any
        device_manager: Devices

        def __init__(self, *ids: str, max_model_version: int) -> None: ...

        def process_child_update(self, report: Message, context: Any) -> None:
            _, _, updates, devices = report.given
            manager, selected = self.model_manager, self.device_manager.current_selection
            selected |= dict.fromkeys(devices, manager.version)
            for version, update in (updates or {}).items():
                _, sent, senders = update.given
                manager.receive(version, sent.data["dict"]["x"] / sent.data["count"])
                selected |= dict.fromkeys(senders, manager.version)

    class Manager:
        version = 1

        def initialize_model(self, model: Message, context: Any) -> None:
            self.current_model = model

        def receive(self, version: int, update: FloatArray) -> None:
            model = np.array(self.current_model.data["x"]) + update / (2 + self.version - version)
            self.version, self.current_model = self.version + 1, Message(data={"x": model.tolist()})

    kinds = SimpleNamespace(WEIGHTS="weights", WEIGHT_DIFF="difference")
    parts: dict[str, dict[str, Any]] = {
        "apis.dxo": {"DXO": Message, "DataKind": kinds},
        "apis.fl_context": {"FLContext": Message},
        "edge.mud": dict.fromkeys(("Device", "ModelUpdate", "StateUpdateReport"), Message),
        "edge.assessors.model_update": {"ModelUpdateAssessor": Assessor},
        "edge.assessors.buff_device_manager": {"BuffDeviceManager": Devices},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"nvflare.{name}", module)
    make = nvflare_server(Manager, clients=2)
    np.testing.assert_allclose(staleness_weights(make, 2), 1 / np.arange(2, 7))
