"""The state of a run: all that changes from round to round."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedshuffle._arrays import FloatArray, IntArray


class ClientRows(Protocol):
    """The vectors that clients keep between rounds; immutable, like all of a state."""

    def rows(self, clients: "IntArray", device: "torch.device | str | None" = None) -> "Tensor":
        """The vectors of some clients, one row each; zero for one that was never updated."""

    def __len__(self) -> int: ...

    def updated(self, clients: "IntArray", rows: "Tensor") -> Self:
        """The same with new vectors for some clients."""


@dataclass(frozen=True)
class State:
    """The model, the state of the server and the clients, the rounds done, and the time."""

    x: "Tensor"
    method_state: "Mapping[str, Tensor]" = field(default_factory=dict)
    """The direction's vectors at the server."""
    optimiser_state: "Mapping[str, Tensor]" = field(default_factory=dict)
    """The tensors of the server optimiser."""
    round: int = 0
    clients: ClientRows | None = None
    """The vectors that clients keep, of the method or of a transform."""
    transform_state: "Mapping[str, Tensor]" = field(default_factory=dict)
    """What transforms keep at the server."""
    sent: int | None = None
    """Number of clients that sent an update in the last round, if not the whole cohort. This and
    the metrics are records; nothing depends on them."""
    metrics: "Mapping[str, FloatArray]" = field(default_factory=dict)
    """Numbers of the last round by name, one per client of its cohort: ``train_loss``,
    ``update_norm``, ``bytes_up``, ``bytes_down`` and those of transforms."""
    replies: "Mapping[str, Tensor]" = field(default_factory=dict)
    """Who of real clients replied so far, if that is estimated."""
    time: float = 0.0
    """Simulated seconds since the start, by the clock of the run."""
    in_flight: "Mapping[int, Tensor]" = field(default_factory=dict)
    """In asynchronous runs: the models, by their number of server steps, that updates still to come
    started from."""
