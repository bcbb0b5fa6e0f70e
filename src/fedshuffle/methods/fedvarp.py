r"""FedVARP: the remembered updates of all clients, and the cohort's correction without bias.

As in MIFA each client's last update :math:`G_i` is remembered. The server moves by

.. math:: x \leftarrow x + \eta_g \eta \Big( \sum_{i=1}^n w_i G_i
          + \sum_{i \in S} \frac{w_i}{p_i} \Big( \frac{y_i - x}{\eta} - G_i \Big) \Big), \qquad
          G_i \leftarrow \frac{y_i - x}{\eta} \quad (i \in S),

(with :math:`\tilde w_i / w_i` before :math:`y_i - x` under other weights). In the mean over cohorts
this is the update of all clients, at once and not only in the long run; its variance is that of the
*changes* of updates, and vanishes as they settle. MIFA is to FedVARP as SAG is to SAGA. If all take
part, it is FedAvg.

Reference: Jhunjhunwala, Sharma, Nagarkatti and Joshi, FedVARP: Tackling the Variance Due to Partial
Client Participation in Federated Learning, 2022. There w is 1/n, and :math:`w_i/p_i = 1/|S|` for a
uniform cohort; here any weights and any sampling. ClusterFedVARP, which remembers one update for
several clients, is not implemented.
"""

from fedshuffle.methods import scaffold
from fedshuffle.methods.method import Family, Method
from fedshuffle.methods.mifa import LastUpdates

METHODS = (
    Method(
        "fedvarp",
        "remembered updates, corrected by w/p",
        scaffold.RULE,  # one step size for all, and weights w/p
        LastUpdates(),
        reference="Jhunjhunwala et al. 2022",
        family=Family("fedvarp", "FedVARP", {"fedvarp": ("FedVARP", "#CC79A7")}),
    ),
)
