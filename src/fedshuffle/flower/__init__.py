"""Flower: the methods of this library on real clients.

On the server, :class:`FedShuffleStrategy` samples clients, tells each its step size, local work and
seed, and aggregates what comes back by inclusion probability. On a client, :func:`client_app` is a
ready ``ClientApp``; :class:`Client` is the same in one call, for an app of one's own. The folder
``local`` brings up a deployment on this machine, to try them. Needs ``fedshuffle[flower]``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedshuffle.errors import FedShuffleError

if TYPE_CHECKING:
    from fedshuffle.flower.client import Client, client_app
    from fedshuffle.flower.strategy import FedShuffleStrategy

__all__ = ["Client", "FedShuffleStrategy", "client_app"]

_HOMES = {"Client": "client", "client_app": "client", "FedShuffleStrategy": "strategy"}


def __getattr__(name: str) -> Any:
    """Import Flower when it is needed: it takes seconds, and is an extra."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "flwr":
            raise
        raise FedShuffleError(
            f"fedshuffle.flower needs Flower ({error}). Install it with"
            " pip install 'fedshuffle[flower]'."
        ) from error
    return getattr(module, name)
