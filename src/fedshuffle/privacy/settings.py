"""What the user says about privacy."""

import math
from dataclasses import dataclass
from typing import Any

from fedshuffle._arrays import count, expect, number
from fedshuffle.errors import FedShuffleError


@dataclass(frozen=True)
class AdaptiveClipping:
    r"""Let the server learn the clipping threshold: it follows a quantile of the update norms.

    After a round, :math:`C \leftarrow C \exp(-\eta (\bar b - \gamma))`, where :math:`\bar b` is a
    noised estimate of the fraction of updates that were not clipped.

    Args:
        quantile: gamma, the fraction of updates to leave unclipped.
        rate: eta, the step size of the threshold.
        count_noise: standard deviation of the noise on the count of unclipped updates; by default
            a twentieth of the expected cohort, as in the paper.

    >>> Privacy(clip=0.1, noise=1.0, adaptive=AdaptiveClipping(quantile=0.8)).adaptive.rate
    0.2

    Reference: Andrew et al., Differentially Private Learning with Adaptive Clipping, 2021.
    """

    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        number(self.quantile, "the quantile of adaptive clipping", within="[0, 1]")
        number(self.rate, "the rate of adaptive clipping", within="(0, inf)")
        if self.count_noise is not None:
            number(self.count_noise, "the count_noise of adaptive clipping", within="(0, inf)")


@dataclass(frozen=True)
class Privacy:
    """User-level differential privacy by the Gaussian mechanism: clip each client's update, sum,
    add noise.

    Args:
        clip: C, the largest norm of a client's update; longer ones are scaled down to it. With
            ``adaptive``, the first threshold.
        noise: the noise multiplier z: the noise on the sum has the standard deviation z times the
            sensitivity of the sum.
        epsilon: what the run may cost. Without ``noise``, the noise multiplier is computed from it,
            from ``delta`` and from the number of rounds; with ``noise``, the run stops before it
            costs more.
        delta: the delta of (epsilon, delta); with ``noise`` it is ``n ** -1.1`` by default.
        weighted: whether to clip ``a_i u_i``, the update times its aggregation weight, instead of
            the update. Then all clients have the same sensitivity.
        adaptive: how the threshold is learned; by default it is fixed.
        min_separation: the fewest rounds between two participations of a client. If it is above 1,
            noise is correlated over rounds and no sampling is needed (tree aggregation).
        server_draws: whether the server itself draws the cohort and keeps it secret. If not, no
            amplification by sampling is claimed.

    >>> Privacy(clip=1.0, noise=0.8).noise
    0.8
    >>> Privacy(noise=0.8)
    Traceback (most recent call last):
    fedshuffle.errors.FedShuffleError: privacy has no clip: without a largest norm of an update no\
 noise is enough. Give clip=, such as 1.0.
    """

    clip: float | None = None
    noise: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    weighted: bool = False
    adaptive: AdaptiveClipping | None = None
    min_separation: int = 1
    server_draws: bool = True

    def __post_init__(self) -> None:
        if self.clip is None:
            raise FedShuffleError(
                "privacy has no clip: without a largest norm of an update no noise is enough."
                " Give clip=, such as 1.0."
            )
        _positive(self.clip, "clip")
        if self.noise is None and self.epsilon is None:
            raise FedShuffleError(
                "privacy has neither noise nor epsilon. Give the noise multiplier, or what the run"
                " may cost."
            )
        if self.noise is not None:
            _positive(self.noise, "noise", " To clip without noise, use the transform Clip.")
        if self.epsilon is not None:
            _positive(self.epsilon, "epsilon")
            if self.delta is None:
                raise FedShuffleError(
                    f"privacy has epsilon={self.epsilon:g} without delta. Give delta=, well below 1"
                    " / (number of clients)."
                )
        if self.delta is not None:
            number(self.delta, "the delta of privacy", within="(0, 1)")
        count(self.min_separation, "the min_separation of privacy")
        if self.adaptive is not None:
            expect(self.adaptive, AdaptiveClipping, "the adaptive of privacy")
            if self.min_separation > 1:
                raise FedShuffleError(
                    "privacy has both adaptive and min_separation: noise that is correlated over"
                    " rounds needs one threshold for all of them. Leave one of the two out."
                )


def _positive(value: Any, what: str, remedy: str = "") -> None:
    found = number(value, f"the {what} of privacy")
    if not 0 < found < math.inf:
        raise FedShuffleError(
            f"the {what} of privacy is {value!r}, but must be positive and finite.{remedy}"
        )
