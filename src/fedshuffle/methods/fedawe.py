r"""FedAWE: a client that returns makes up for the rounds it missed.

Client i trains from :math:`x_i`, the model after the round :math:`\tau_i` in which it last took
part (:math:`\tau_i = -1` and :math:`x_i = x^0` at first), to :math:`y_i`. In round t

.. math:: x \leftarrow \sum_{i \in S} \frac{w_i}{\sum_{j \in S} w_j}
          \big( x_i + \eta_g (t - \tau_i) (y_i - x_i) \big), \qquad
          x_i \leftarrow x, \; \tau_i \leftarrow t \quad (i \in S).

The *echo* :math:`t - \tau_i` counts the update for all rounds since the last, so that over time
every client counts equally often, whoever comes when. Averaging the *models* of those who are there
is *implicit gossip*: it preserves :math:`\sum_i w_i x_i`, the mean over all clients, which weights
that sum to one over the cohort would otherwise pull to those who are there often. No inclusion
probability is needed, nor an update stored for each client by the server; each client keeps the
last model that it received.

A client that was away for long takes a large step: choose a step size that is stable for it.

Reference: Xiang, Ioannidis, Yeh, Joe-Wong and Su, Efficient Federated Learning against
Heterogeneous and Non-stationary Client Unavailability, 2024. There w is 1/n and all take the same
number of steps. Here the update is also multiplied by :math:`\tilde w_i / w_i` if an averaging rule
has other weights.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedshuffle._arrays import FloatArray
from fedshuffle.kernel import StepCoefficients
from fedshuffle.methods import fedavg
from fedshuffle.methods.directions import (
    CohortMoments,
    Direction,
    LocalPlan,
    OwnModels,
    RoundContext,
    Steps,
)
from fedshuffle.methods.method import Family, Method

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Echo(Direction):
    """The gradient from the client's own model, times the rounds since it last took part."""

    client_state = remembers = own_models = True

    def round(self, context: RoundContext) -> Steps:
        x, cohort, state = context.x, context.cohort, context.state
        first, last = state.get("first", x), _extended(state.get("last"), cohort.clients.max() + 1)
        since = last[cohort.clients].numpy()
        share, groups, mean = cohort.weight / cohort.weight.sum(), [], x.new_zeros(x.shape)
        for tau in np.unique(since):
            places = np.flatnonzero(since == tau)
            own = first if tau < 0 else context.kept(cohort.clients[places[:1]])[0]
            groups.append((places, own))
            mean = mean + float(share[places].sum()) * own
        # The averaging rule divides by the sum of w-tilde over the cohort, the gossip by that of w.
        factor = context.averaging.client_weights(cohort).sum() / cohort.weight.sum()
        echo = factor * (cohort.round - since)
        yield LocalPlan(StepCoefficients(), factors=echo, own=OwnModels(groups, mean))
        last[cohort.clients] = cohort.round
        return {"first": first, "last": last}

    def effective_weights(self, moments: CohortMoments) -> FloatArray:
        """Over time every client counts once per round."""
        return moments.contribution


def _extended(last: "Tensor | None", n: int) -> "Tensor":
    """A copy of the clients' last rounds, of at least n clients; -1 for those that never came."""
    import torch

    known = 0 if last is None else len(last)
    longer = torch.full((max(known, int(n)),), -1)
    if last is not None:
        longer[:known] = last
    return longer


METHODS = (
    Method(
        "fedawe",
        "updates times the rounds missed, models averaged",
        fedavg.RULE,
        Echo(),
        reference="Xiang et al. 2024",
        family=Family("fedawe", "FedAWE", {"fedawe": ("FedAWE", "#E69F00")}),
    ),
)
