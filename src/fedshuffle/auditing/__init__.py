"""The audit: which objective a method, or other people's code, really minimises. Needs no torch."""

from fedshuffle.auditing.audit import audit, contributions
from fedshuffle.auditing.blackbox import audit_server
from fedshuffle.auditing.findings import Finding
from fedshuffle.auditing.quadrature import expected_ratio
from fedshuffle.auditing.result import Audit

__all__ = ["Audit", "Finding", "audit", "audit_server", "contributions", "expected_ratio"]
