"""The model as the server has it: named arrays for Flower, one flat vector for the methods."""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedshuffle import fingerprint
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower.protocol import ClientInfo


class Model:
    """Which of the arrays are trained, in which order, and what the others are.

    Args:
        arrays: all arrays of the model, such as ``ArrayRecord(model.state_dict())``.
        info: how a client describes its model; what it does not train must be as it is here.
    """

    def __init__(self, arrays: ArrayRecord, info: ClientInfo) -> None:
        self.trained = {name: tuple(shape) for name, shape in info.parameters.items()}
        self.dtype = getattr(torch, info.dtype, None)
        if self.dtype not in (torch.float16, torch.float32, torch.float64):
            raise FedShuffleError(
                f"clients compute in {info.dtype}, which cannot be sent as a plain array. Use a"
                " model of float32, float64 or float16."
            )
        for name, shape in self.trained.items():
            if name not in arrays:
                raise FedShuffleError(
                    f"clients train {name!r}, which is not among the server's arrays. Build the"
                    " same model on both sides: ArrayRecord(model.state_dict())."
                )
            if (found := tuple(arrays[name].shape)) != shape:
                raise FedShuffleError(
                    f"parameter {name!r} has shape {found} on the server and {shape} on clients."
                    " Build the same model on both sides."
                )
        self._names = {name: info.tied.get(name, name) for name in arrays}
        self._rest = {k: array for k, array in arrays.items() if self._names[k] not in self.trained}
        for name, array in self._rest.items():
            values = torch.from_numpy(np.require(array.numpy(), requirements="W"))
            if info.frozen.get(name) != fingerprint.tensor(values):
                raise FedShuffleError(
                    f"{name!r} is not trained, and has other values on the server than on clients."
                    " Give both sides the same, such as the same file of pretrained weights."
                )

    def digest(self) -> str:
        """A fingerprint of the names, shapes and precision."""
        return hashlib.sha256(json.dumps([self.trained, str(self.dtype)]).encode()).hexdigest()

    def flat(self, arrays: ArrayRecord) -> Tensor:
        """What is trained, as one vector."""
        parts = [np.asarray(arrays[name].numpy()).reshape(-1) for name in self.trained]
        x = torch.from_numpy(np.concatenate(parts)).to(self.dtype)
        if not torch.isfinite(x).all():
            raise FedShuffleError("the server's model is not finite: give another start.")
        return x

    def arrays(self, x: Tensor) -> ArrayRecord:
        """All arrays by name, in the order in which they were given."""
        sizes = [math.prod(shape) for shape in self.trained.values()]
        pieces = zip(self.trained.items(), x.split_with_sizes(sizes), strict=True)
        trained = {name: Array(part.numpy().reshape(shape)) for (name, shape), part in pieces}
        return ArrayRecord(
            {name: trained.get(first) or self._rest[name] for name, first in self._names.items()}
        )
