"""The model as the server has it: named arrays for Flower, one flat vector for the methods."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedshuffle import fingerprint
from fedshuffle.errors import FedShuffleError


class Model:
    """Which of the arrays are trained, in which order, and what the others are.

    Args:
        arrays: all arrays of the model, such as ``ArrayRecord(model.state_dict())``.
        trained: names and shapes of those that clients train, in their order.
        dtype: what clients compute in, such as ``"float32"``.
        tied: further names of those that are trained, and the first.
        frozen: digests of what else clients have, which must be as it is here.
    """

    def __init__(
        self,
        arrays: ArrayRecord,
        trained: Mapping[str, Sequence[int]],
        dtype: str,
        tied: Mapping[str, str],
        frozen: Mapping[str, str],
    ) -> None:
        self.trained = {name: tuple(shape) for name, shape in trained.items()}
        self.dtype = getattr(torch, dtype, None)
        if self.dtype not in (torch.float16, torch.float32, torch.float64):
            raise FedShuffleError(
                f"clients compute in {dtype}, which cannot be sent as a plain array. Use a model of"
                " float32, float64 or float16."
            )
        self._rest = {name: array for name, array in arrays.items() if name not in trained}
        self._names = {name: tied.get(name, name) for name in arrays}
        for name, shape in self.trained.items():
            if name not in arrays:
                raise FedShuffleError(
                    f"clients train {name!r}, which is not among the server's arrays. Build the"
                    " same model on both sides: ArrayRecord(model.state_dict())."
                )
            found = tuple(arrays[name].shape)
            if found != shape:
                raise FedShuffleError(
                    f"parameter {name!r} has shape {found} on the server and {shape} on clients."
                    " Build the same model on both sides."
                )
        for name, array in self._rest.items():
            if name not in tied and frozen.get(name) != _digest(array):
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


def _digest(array: Array) -> str:
    return fingerprint.tensor(torch.from_numpy(np.require(array.numpy(), requirements="W")))
