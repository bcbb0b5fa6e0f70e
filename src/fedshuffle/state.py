"""The state of a run: all that changes from round to round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True)
class State:
    """The model, what the server remembers, and how many rounds are done."""

    x: Tensor
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    round: int = 0
