r"""Amplified updates: what P rounds have moved is moved again, once all clients had a turn.

The server does FedAvg's step in every round, and after every P rounds, begun at :math:`x_0`,

.. math:: x \leftarrow x_0 + \eta \, (x - x_0),

with the factor :math:`\eta`. Clients that take turns (by day and night, or in a cycle) are all
heard within P rounds if P is the length of the cycle. So local steps may be small enough that the
turns hardly matter, and the factor makes up for the speed. It changes the pace and not the
objective, which is that of the averaging rule: FedAvg's unless another is given
(``amplified+fedshuffle``).

Reference: Wang and Ji, A Unified Analysis of Federated Learning with Arbitrary Client
Participation, 2022.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedshuffle._arrays import count, number
from fedshuffle.methods import fedavg
from fedshuffle.methods.method import Family, Method
from fedshuffle.methods.servers import ServerOptimiser, ServerState

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Amplify(ServerOptimiser):
    r"""Adds the update; after ``every`` rounds, multiplies what they moved by ``factor``."""

    every: int = 10
    factor: float = 2.0
    every_round = True  # a round without clients is one of the P

    def __post_init__(self) -> None:
        count(self.every, "every, the number of rounds between amplifications,")
        number(self.factor, "the factor of amplification", within="(0, inf)")

    def step(
        self, x: "Tensor", update: "Tensor", step_size: float, state: ServerState
    ) -> "tuple[Tensor, ServerState]":
        import torch

        start, rounds = state.get("start", x), int(state.get("rounds", 0)) + 1
        after = x + step_size * update
        if rounds == self.every:
            start = after = start + self.factor * (after - start)
        return after, {"start": start, "rounds": torch.tensor(rounds % self.every)}


METHODS = (
    Method(
        "amplified",
        "FedAvg, amplified every P rounds",
        fedavg.RULE,
        server=Amplify(),
        reference="Wang and Ji 2022",
        family=Family("amplified", "Amplified updates", {"amplified": ("Amplified", "#D55E00")}),
    ),
)
