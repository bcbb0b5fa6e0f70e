r"""Evaluation: how good a model is, over all clients and for those it serves worst.

A metric has a value :math:`m_{ij}` for every example j of client i, a function of the model's
outputs and the target. With :math:`m_i` the mean over the client's examples,

.. math:: h\Big(\sum_i w_i m_i\Big) \text{ is the metric over the whole, and } h(m_i)
   \text{ that of client i,}

where the weights w are those of the federation evaluated on (by default the sum is then the mean
over all examples), and h is the exponential for perplexity and leaves the others as they are.
Metrics that are no such means, as AUC and F1, are in :mod:`fedshuffle.evaluation.set_metrics`.
"""

from __future__ import annotations

from fedshuffle.evaluation.clients import ClientTable
from fedshuffle.evaluation.evaluation import Evaluation, Evaluations, evaluating
from fedshuffle.evaluation.metrics import Metric
from fedshuffle.evaluation.set_metrics import SetMetric, from_torchmetrics

__all__ = [
    "ClientTable",
    "Evaluation",
    "Evaluations",
    "Metric",
    "SetMetric",
    "evaluating",
    "from_torchmetrics",
]
