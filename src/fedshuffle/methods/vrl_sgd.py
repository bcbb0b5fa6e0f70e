r"""VRL-SGD: each client corrects its gradient by how its updates have differed from the mean.

.. math:: y \leftarrow y - \gamma (g(y) - \Delta_i), \qquad
          \Delta_i \leftarrow \Delta_i + \frac{x^+ - y_i}{\tau \gamma}

with :math:`x^+` the mean of all :math:`y_i`. Written with :math:`\Delta_i = c_i - c` these are
SCAFFOLD's control variates from the local update, at full participation and with server step size
1, and are implemented as such. Under sampling :math:`\sum_i w_i \Delta_i = 0` would be lost by the
formula above and the method would stop anywhere; the control variates preserve it.

Reference: Liang et al., Variance Reduced Local SGD with Lower Communication Complexity, 2019.
"""

from __future__ import annotations

from fedshuffle.methods.method import Family, Method
from fedshuffle.methods.scaffold import RULE, ControlVariates

_FAMILY = Family("vrl-sgd", "VRL-SGD", {"vrl-sgd": ("VRL-SGD", "#CC79A7")})
METHODS = (
    Method(
        "vrl-sgd",
        "SCAFFOLD in other words; full participation in its paper",
        RULE,
        direction=ControlVariates("update"),
        reference="Liang et al. 2019",
        family=_FAMILY,
    ),
)
