"""The state of a run: all that changes from round to round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torch import Tensor

    from fedshuffle.client_memory import ClientMemory


@final
@dataclass(frozen=True)
class State:
    """The model, what the server and the clients remember, and how many rounds are done."""

    x: Tensor
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    round: int = 0
    clients: ClientMemory | None = None
    """What clients keep, for methods with client state."""
    sent: int | None = None
    """How many clients sent an update in the last round, if not all of its cohort; only a record,
    nothing follows from it."""
