"""The audit: which objective a method, or other people's code, really minimises. Needs no torch."""

from fedshuffle.auditing.async_servers import audit_async_server
from fedshuffle.auditing.audit import audit
from fedshuffle.auditing.blackbox import audit_server
from fedshuffle.auditing.effective_weights import contributions
from fedshuffle.auditing.findings import Finding
from fedshuffle.auditing.logs import read_log
from fedshuffle.auditing.privacy import PrivacyAudit, audit_privacy
from fedshuffle.auditing.quadrature import expected_ratio
from fedshuffle.auditing.result import Audit
from fedshuffle.auditing.transforms import ClippingReport, clipping_report, measured_clipping

__all__ = [
    "Audit",
    "ClippingReport",
    "Finding",
    "PrivacyAudit",
    "audit",
    "audit_async_server",
    "audit_privacy",
    "audit_server",
    "clipping_report",
    "contributions",
    "expected_ratio",
    "measured_clipping",
    "read_log",
]
