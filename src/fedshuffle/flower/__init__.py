"""Flower: the methods of this library on real clients.

:class:`ConsistentFedAvg` takes the place of Flower's FedAvg in an app with a ``train`` function of
its own, and :class:`ConsistentFedBuff` trains such an app without rounds. In the exact option,
:class:`FedShuffleStrategy` on the server samples clients, sends each its step size, local work and
seed, and aggregates the updates by inclusion probability; on a client, :func:`client_app` is a
ready ``ClientApp``, and :class:`Client` handles one message in a ``ClientApp`` of your own. The
module ``local`` starts a deployment on this machine. Needs ``fedshuffle[flower]``.
"""

from typing import TYPE_CHECKING, Any

from fedshuffle._lazy import attach
from fedshuffle.errors import optional_import

if TYPE_CHECKING:
    from fedshuffle.flower.asynchronous import ConsistentFedBuff
    from fedshuffle.flower.client import Client, client_app
    from fedshuffle.flower.consistent_fedavg import ConsistentFedAvg
    from fedshuffle.flower.secure_aggregation import SecureAggregation
    from fedshuffle.flower.strategy import FedShuffleStrategy

__all__ = [
    "Client",
    "ConsistentFedAvg",
    "ConsistentFedBuff",
    "FedShuffleStrategy",
    "SecureAggregation",
    "client_app",
]

_load = attach(__name__)


def __getattr__(name: str) -> Any:
    """Import Flower on first use: it takes seconds, and is an extra."""
    if name in __all__:
        optional_import("flwr", "fedshuffle.flower", "flower")
    return _load(name)
