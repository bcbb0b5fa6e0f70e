"""The audit: which objective a method really minimises. Needs no torch."""

from __future__ import annotations

from fedshuffle.auditing.audit import Audit, audit, mass
from fedshuffle.auditing.findings import Finding
from fedshuffle.auditing.quadrature import expected_ratio

__all__ = ["Audit", "Finding", "audit", "expected_ratio", "mass"]
