"""Flower: the methods of this library on real clients.

On the server, :class:`FedShuffleStrategy` samples clients, sends each its step size, local work and
seed, and aggregates the updates by inclusion probability. On a client, :func:`client_app` is a
ready ``ClientApp``; :class:`Client` handles one message: use it in your own ``ClientApp``. The
module ``local`` starts a deployment on this machine. Needs ``fedshuffle[flower]``.
"""

from typing import TYPE_CHECKING, Any

from fedshuffle._lazy import attach
from fedshuffle.errors import optional_import

if TYPE_CHECKING:
    from fedshuffle.flower.client import Client, client_app
    from fedshuffle.flower.secure_aggregation import SecureAggregation
    from fedshuffle.flower.strategy import FedShuffleStrategy

__all__ = ["Client", "FedShuffleStrategy", "SecureAggregation", "client_app"]

_load = attach(__name__)


def __getattr__(name: str) -> Any:
    """Import Flower on first use: it takes seconds, and is an extra."""
    if name in __all__:
        optional_import("flwr", "fedshuffle.flower", "flower")
    return _load(name)
