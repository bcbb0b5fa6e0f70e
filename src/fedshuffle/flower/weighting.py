"""How much a client with a ``train`` of its own counts, and what corrects for its steps."""

import logging
from collections.abc import Sequence
from typing import final

import numpy as np

from fedshuffle._arrays import FloatArray, count, number
from fedshuffle.errors import unknown
from fedshuffle.flower.population import Report
from fedshuffle.flower.train_replies import TrainReply
from fedshuffle.local_optimisers import LocalOptimiser

_log = logging.getLogger("flwr.fedshuffle")


@final
class Weighting:
    """The objective, and what clients make their steps with.

    >>> weighting = Weighting("examples", "sgd")
    >>> weighting.mean_length([Report(examples=1, steps=2), Report(examples=3, steps=6)])
    5.0
    """

    def __init__(
        self,
        objective: str,
        optimiser: LocalOptimiser | str,
        local_steps: int | None = None,
        server_step_size: float = 1.0,
        mean_examples: float | None = None,
    ) -> None:
        if objective not in (known := ["examples", "clients"]):
            raise unknown("objective", objective, known)
        self.objective = objective
        self.optimiser = LocalOptimiser.of(optimiser)
        self.local_steps = None if local_steps is None else count(local_steps, "local_steps")
        self.server_step_size = number(server_step_size, "server_step_size", within="(0, inf)")
        if mean_examples is not None:
            number(mean_examples, "mean_examples", within="(0, inf)")
        self.mean_examples = mean_examples
        self._explained = False

    def mean_length(self, clients: Sequence[Report]) -> float | None:
        """How far clients' steps go on average, by the objective's weights; None if not known."""
        if self.local_steps is not None:
            return float(self.optimiser.lengths(np.array([self.local_steps]))[0])
        if not clients:
            return None
        weights = [c.examples if self.objective == "examples" else 1.0 for c in clients]
        lengths = self.optimiser.lengths(np.array([client.steps for client in clients]))
        return float(np.average(lengths, weights=weights))

    def weights(self, replies: Sequence[TrainReply], clients: Sequence[Report]) -> FloatArray:
        """The objective's weights, where the mean client has the weight 1."""
        if self.objective == "clients":
            return np.ones(len(replies))
        mean = self.mean_examples or np.mean([client.examples for client in clients])
        weights: FloatArray = np.array([reply.examples for reply in replies]) / mean
        return weights

    def per_length(self, replies: Sequence[TrainReply], planned: FloatArray | float) -> FloatArray:
        """What makes each update as long as was planned."""
        done = self.optimiser.lengths(np.array([reply.steps for reply in replies]))
        factors: FloatArray = self.server_step_size * planned / done
        return factors

    def explain(self, replies: Sequence[TrainReply]) -> None:
        """Log, once, what weighting by the steps can and cannot repair."""
        if self._explained:
            return
        least, most = (extreme(reply.steps for reply in replies) for extreme in (min, max))
        did = f"clients did {least:g} to {most:g} steps of {self.optimiser}, and"
        lost = "uneven steps of adaptive optimisers minimise no weighted objective"
        asked = self.local_steps
        others = asked is not None and not least == most == asked
        self._explained = others or least < most
        if others:
            _log.warning(
                f"{did} were asked for {asked}: let them do planned-steps steps and report that"
                f" number. Until then the server's step is shorter or longer than meant, and {lost}"
                "."
            )
        elif least < most and not self.optimiser.linear:
            _log.warning(f"{did} {lost}: give all clients the same number (local_steps).")
        elif least < most:
            _log.info(
                f"{did} are weighted by how far these go. That is exact if clients do use"
                f" {self.optimiser}, new in each round. If not, say what:"
                ' optimiser="sgd:momentum=0.9", or "adamw".'
            )
