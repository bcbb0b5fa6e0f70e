"""Names and numbers of a comparison in words."""

from __future__ import annotations

import math
import re


def momentum_title(momentum: str) -> str:
    """A momentum in words; ``a`` is the share of the new gradient."""
    kind, _, share = momentum.partition(":")
    words = {"global": "momentum", "mvr": "exact momentum (MVR)"}
    return f"{words[kind]} {1 - float(share):.6g}" if kind in words else "no momentum"


def group_title(group: str) -> str:
    """What the curves of a group share."""
    kind, _, size = group.partition(":")
    return "own best step size" if kind == "own" else f"common step size {size}"


def metric_title(metric: str, trained: bool) -> str:
    """A metric in words; it is on test data if others are on training data (``train_``)."""
    words = re.sub("_worst_decile$", ", worst tenth of the clients", metric)
    words = re.sub("^train_", "train ", re.sub("_mean$", ", mean of clients", words))
    return f"test {words}" if trained and not metric.startswith("train_") else words


def is_share(metric: str) -> bool:
    """Whether a metric is a share of examples, which is shown in percent."""
    return re.search(r"(^|_)(accuracy|top-[0-9]+)(_|$)", metric) is not None


def value_text(value: float, metric: str, near: float | None = None) -> str:
    """A value for a person: percent without the sign, or four significant digits (of ``near``)."""
    if is_share(metric):
        return f"{100 * value:.2f}"
    size = abs(value if near is None else near)
    if size == 0:
        return f"{value:.3g}"
    digits = 3 - math.floor(math.log10(size))
    return f"{value:.{digits}f}" if 0 <= digits <= 7 else f"{value:.3e}"


def spread_text(mean: float, std: float | None, metric: str) -> str:
    """Mean and standard deviation."""
    text = value_text(mean, metric)
    return text if std is None else f"{text} ± {value_text(std, metric, mean)}"
