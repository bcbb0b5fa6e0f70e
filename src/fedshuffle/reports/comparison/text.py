"""Names and numbers of a comparison in words."""

from __future__ import annotations

import math
import re


def momentum_title(momentum: str) -> str:
    """A momentum in words; ``a`` is the share of the new gradient.

    >>> momentum_title("none"), momentum_title("global:0.1"), momentum_title("mvr:0.1")
    ('no momentum', 'momentum 0.9', 'exact momentum (MVR) 0.9')
    """
    kind, _, share = momentum.partition(":")
    words = {"global": "momentum", "mvr": "exact momentum (MVR)"}
    return f"{words[kind]} {1 - float(share):.6g}" if kind in words else "no momentum"


def group_title(group: str) -> str:
    """What the curves of a group share.

    >>> group_title("own"), group_title("common:0.1")
    ('own best step size', 'common step size 0.1')
    """
    kind, _, size = group.partition(":")
    return "own best step size" if kind == "own" else f"common step size {size}"


def metric_title(metric: str, trained: bool) -> str:
    """A metric in words; it is on test data if others are on training data (``train_``).

    >>> metric_title("accuracy", trained=True), metric_title("train_loss", trained=True)
    ('test accuracy', 'train loss')
    >>> metric_title("accuracy_worst_decile", trained=False)
    'accuracy, worst tenth of the clients'
    """
    words = metric.replace("_worst_decile", ", worst tenth of the clients")
    words = words.replace("_mean", ", mean of clients")
    if metric.startswith("train_"):
        return words.replace("train_", "train ", 1)
    return f"test {words}" if trained else words


def is_share(metric: str) -> bool:
    """Whether a metric is a share of examples, which is shown in percent.

    >>> is_share("test_top-5_mean"), is_share("train_loss")
    (True, False)
    """
    return re.search(r"(^|_)(accuracy|top-[0-9]+)(_|$)", metric) is not None


def value_text(value: float, metric: str, near: float | None = None) -> str:
    """A value for a person: percent without the sign, or four significant digits (of ``near``).

    >>> value_text(0.59571, "accuracy"), value_text(1.23456, "loss"), value_text(0.01, "loss", 1.2)
    ('59.57', '1.235', '0.010')
    """
    if is_share(metric):
        return f"{100 * value:.2f}"
    size = abs(value if near is None else near)
    if size == 0:
        return f"{value:.3g}"
    digits = 3 - math.floor(math.log10(size))
    return f"{value:.{digits}f}" if 0 <= digits <= 7 else f"{value:.3e}"


def spread_text(mean: float, std: float | None, metric: str) -> str:
    """Mean and standard deviation.

    >>> spread_text(0.42, 0.0283, "accuracy"), spread_text(0.42, None, "accuracy")
    ('42.00 ± 2.83', '42.00')
    """
    text = value_text(mean, metric)
    return text if std is None else f"{text} ± {value_text(std, metric, mean)}"
