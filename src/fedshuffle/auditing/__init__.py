"""The audit: which objective a method, or other people's code, really minimises. Needs no torch."""

from __future__ import annotations

from fedshuffle.auditing.audit import Audit, audit, mass
from fedshuffle.auditing.blackbox import probe
from fedshuffle.auditing.findings import Finding
from fedshuffle.auditing.quadrature import expected_ratio
from fedshuffle.auditing.verdict import BlackBoxAudit

__all__ = ["Audit", "BlackBoxAudit", "Finding", "audit", "expected_ratio", "mass", "probe"]
