"""The conformance suite: what every method and every sampling must do, yours as well.

>>> from fedshuffle import conformance
>>> report = conformance.check("fedshuffle", checks=["order", "descent"])
>>> report.passed, len(report.outcomes)
(True, 2)
"""

from __future__ import annotations

from fedshuffle.conformance.report import ConformanceError, Outcome, Report
from fedshuffle.conformance.suite import CHECKS, SAMPLINGS, check, check_sampling

__all__ = [
    "CHECKS",
    "SAMPLINGS",
    "ConformanceError",
    "Outcome",
    "Report",
    "check",
    "check_sampling",
]
