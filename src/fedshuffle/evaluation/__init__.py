r"""Evaluation: how good a model is, over all clients and for those it serves worst.

With :math:`m_i` the mean of a metric over the examples of client i,

.. math:: h\Big(\sum_i w_i m_i\Big) \text{ is the metric over all clients, and } h(m_i)
   \text{ that of client i,}

where w are the weights of the federation, and h is the exponential for perplexity and the identity
otherwise. Metrics that are not means, such as AUC and F1, need all examples at once.
"""

from __future__ import annotations

from fedshuffle.evaluation.clients import ClientTable
from fedshuffle.evaluation.evaluation import Evaluation, Evaluations, evaluation_mode
from fedshuffle.evaluation.metrics import Metric, SetMetric, from_torchmetrics

__all__ = [
    "ClientTable",
    "Evaluation",
    "Evaluations",
    "Metric",
    "SetMetric",
    "evaluation_mode",
    "from_torchmetrics",
]
