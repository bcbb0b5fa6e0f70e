"""The conformance suite: what every method and every sampling must do, yours as well.

>>> from fedshuffle import testing as conformance
>>> report = conformance.check("fedshuffle", checks=["order", "descent"])
>>> report.passed, len(report.results)
(True, 2)
"""

from __future__ import annotations

from fedshuffle.testing.report import CheckResult, ConformanceError, Report
from fedshuffle.testing.suite import CHECKS, SAMPLINGS, check, check_sampling

__all__ = [
    "CHECKS",
    "SAMPLINGS",
    "CheckResult",
    "ConformanceError",
    "Report",
    "check",
    "check_sampling",
]
