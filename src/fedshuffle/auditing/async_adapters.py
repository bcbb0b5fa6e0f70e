"""Asynchronous servers of other frameworks in the form that their audit needs.

Each adapter takes what makes a fresh server of the framework. Nothing of the framework is imported
here unless it is needed to build its messages.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.async_servers import MakeServer

_NAME = "x"  # of the only parameter


def appfl_server(make: Callable[[Any], Any]) -> MakeServer:
    """An aggregator of APPFL (FedAsync, FedBuff, FedCompass): ``make(model)`` makes a fresh one.

    Clients send their update's negative if ``gradient_based`` is set, else their model. Staleness,
    which FedCompass gets from its scheduler, counts the uploads since the download.
    """
    return lambda parameters: _APPFL(make, parameters)


class _APPFL:
    def __init__(self, make: Callable[[Any], Any], parameters: int) -> None:
        self._aggregator = make(_module(parameters))
        self._sends_update = bool(self._aggregator.aggregator_configs.get("gradient_based", False))
        self._starts: dict[int, tuple[int, Any]] = {}
        self._uploads = 0

    def download(self, client: int) -> FloatArray:
        model = self._aggregator.get_parameters(client_id=client)[_NAME].detach().clone()
        self._starts[client] = self._uploads, model
        return _numpy(model)

    def upload(self, client: int, update: FloatArray) -> None:
        (version, start), moved = self._starts[client], _tensor(update)
        sent = {_NAME: -moved if self._sends_update else start + moved}
        self._aggregator.aggregate(client, sent, staleness=self._uploads - version)
        self._uploads += 1


def flsim_server(make: Callable[[Any], Any], sizes: Sequence[int]) -> MakeServer:
    """FLSim's asynchronous trainer: ``make(model)`` makes a fresh ``AsyncTrainer``.

    The trainer weights and aggregates; its metrics are left out. ``sizes`` are the clients' numbers
    of examples.
    """
    return lambda parameters: _FLSim(make, parameters, sizes)


class _FLSim:
    def __init__(self, make: Callable[[Any], Any], parameters: int, sizes: Sequence[int]) -> None:
        self._trainer = make(_FLModel(_module(parameters)))
        self._trainer._global_update_done = lambda: None  # it reports, and evaluates
        self._devices = [_Device(size, parameters) for size in sizes]

    def download(self, client: int) -> FloatArray:
        device = self._devices[client]
        self._trainer.on_training_start(device)
        return _numpy(device.start)

    def upload(self, client: int, update: FloatArray) -> None:
        device = self._devices[client]
        device.train(_tensor(update))
        self._trainer.train_and_update_global_model(device)


class _FLModel:
    """A model as FLSim knows it."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def fl_get_module(self) -> Any:
        return self._module


class _Device:
    """A client as FLSim's asynchronous trainer knows it."""

    local_model: Any = None
    model_seqnum = -1

    def __init__(self, size: int, parameters: int) -> None:
        self._size = size
        self._delta, self._final = (_FLModel(_module(parameters)) for _ in range(2))

    def training_started(self, model_seqnum: int, init_model: Any) -> None:
        self.model_seqnum, self.local_model = model_seqnum, init_model
        self.start = init_model.fl_get_module().x.detach().clone()

    def train(self, update: Any) -> None:
        """Move from where it started; FLSim's deltas point backwards."""
        self._delta.fl_get_module().x.data.copy_(-update)
        self._final.fl_get_module().x.data.copy_(self.start + update)

    def train_local_model(self, metrics_reporter: Any = None) -> tuple[_FLModel, _FLModel, int]:
        return self._delta, self._final, self._size


def nvflare_server(make: Callable[[], Any], clients: int) -> MakeServer:
    """NVFlare's buffered aggregation: ``make()`` makes a fresh ``BuffModelManager``.

    It works inside NVFlare's ``ModelUpdateAssessor``. Every client is one device, and all of them
    are selected all the time.
    """
    return lambda parameters: _NVFlare(make, parameters, clients)


class _NVFlare:
    def __init__(self, make: Callable[[], Any], parameters: int, clients: int) -> None:
        dxo, mud = _nvflare("apis.dxo"), _nvflare("edge.mud")
        self._dxo, self._mud, self._context = dxo, mud, _nvflare("apis.fl_context").FLContext()
        self._assessor = _nvflare("edge.assessors.model_update").ModelUpdateAssessor(
            "persistor", "models", "devices", max_model_version=2**62
        )
        devices = _nvflare("edge.assessors.buff_device_manager").BuffDeviceManager(clients)
        self._models, self._selected = make(), devices.current_selection
        self._assessor.model_manager, self._assessor.device_manager = self._models, devices
        zero = dxo.DXO(dxo.DataKind.WEIGHTS, data={_NAME: np.zeros(parameters)})
        self._models.initialize_model(zero, self._context)
        self._report(None, {str(k): mud.Device(str(k), "all", 0.0) for k in range(clients)})

    def download(self, client: int) -> FloatArray:
        return np.array(self._models.current_model.data[_NAME], dtype=np.float64)

    def upload(self, client: int, update: FloatArray) -> None:
        version = self._selected[str(client)]
        data = {"dict": {_NAME: update}, "count": 1}
        sent = self._dxo.DXO(self._dxo.DataKind.WEIGHT_DIFF, data=data).to_shareable()
        self._report({version: self._mud.ModelUpdate(version, sent, {str(client): 0.0})}, {})

    def _report(self, updates: Mapping[int, Any] | None, devices: Mapping[str, Any]) -> None:
        report = self._mud.StateUpdateReport(0, 0, updates, devices)
        self._assessor.process_child_update(report.to_shareable(), self._context)


def _nvflare(part: str) -> Any:
    return import_module(f"nvflare.{part}")


def _module(parameters: int) -> Any:
    """A torch module whose only parameter is x, in double precision: small updates must not drown
    in what the model has grown to.
    """
    import torch

    module = torch.nn.Module()
    module.x = torch.nn.Parameter(torch.zeros(parameters, dtype=torch.float64))
    return module


def _tensor(values: FloatArray) -> Any:
    import torch

    return torch.from_numpy(values)


def _numpy(tensor: Any) -> FloatArray:
    array: FloatArray = tensor.numpy().astype(np.float64)
    return array
