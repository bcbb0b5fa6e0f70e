r"""DiLoCo: many local steps of AdamW, and Nesterov momentum at the server.

Every client takes the same number H of local steps of AdamW; the server takes the average of the
updates for (minus) a gradient and steps along it with Nesterov momentum:

.. math:: \Delta = \sum_i w_i (y_i - x), \qquad m \leftarrow b m + \Delta, \qquad
          x \leftarrow x + \eta_g (\Delta + b m).

The authors' settings are :math:`\eta_g = 0.7`, b = 0.9, H = 500 and AdamW with weight decay 0.1.
There each worker keeps its moments of AdamW; here they start from zero in every round.

With full participation and equal steps only. For sampled clients use
``fedavgm:nesterov=true+fedshuffle`` with the local optimiser ``adamw`` and equal steps.

Reference: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
2023.
"""

from fedshuffle.methods import fedshuffle
from fedshuffle.methods.method import Family, Method
from fedshuffle.methods.servers import Momentum

METHODS = (
    Method(
        "diloco",
        "local AdamW, Nesterov momentum at the server",
        fedshuffle.RULE,
        server=Momentum(0.9, nesterov=True),
        work={"optimiser": "adamw:weight_decay=0.1"},
        balanced_only=True,
        reference="Douillard et al. 2023",
        family=Family("diloco", "DiLoCo", {"diloco": ("DiLoCo", "#0072B2")}),
    ),
)
