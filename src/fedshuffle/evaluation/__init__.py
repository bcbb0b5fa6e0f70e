"""Evaluation: how good a model is, over all clients and for those it serves worst.

A metric over all clients is ``sum_i w_i m_i``, with ``m_i`` its mean over the examples of client i
and ``w`` the weights of the federation. For AUC, F1 and perplexity see ``docs/how-to/evaluate.md``.
"""

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
