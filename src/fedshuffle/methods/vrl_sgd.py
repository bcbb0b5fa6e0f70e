r"""VRL-SGD: each client corrects its gradient by how its own walks have differed from the mean.

.. math:: y \leftarrow y - \gamma (g(y) - \Delta_i), \qquad
          \Delta_i \leftarrow \Delta_i + \frac{x^+ - y_i}{\tau \gamma}

with :math:`x^+` the mean of all :math:`y_i`. Written with :math:`\Delta_i = c_i - c` these are
SCAFFOLD's control variates renewed from the walk, at full participation and with server step size
1, and so they are kept here. Under sampling, :math:`\sum_i w_i \Delta_i = 0` would be lost by the
formula above and the method would stop anywhere; the control variates keep it.

Reference: Liang et al., Variance Reduced Local SGD with Lower Communication Complexity, 2019.
"""

from __future__ import annotations

from fedshuffle.methods.method import Method
from fedshuffle.methods.scaffold import RULE, ControlVariates

METHODS = (
    Method(
        "vrl-sgd",
        "SCAFFOLD's walk in other words; full participation in its paper",
        RULE,
        direction=ControlVariates("walk"),
        reference="Liang et al. 2019",
    ),
)
