"""Adapters: other people's servers, as the black-box auditor speaks to them."""

from __future__ import annotations

from fedshuffle.auditing.adapters.base import Aggregator, Replies
from fedshuffle.auditing.adapters.callable import Function
from fedshuffle.auditing.adapters.flower import Flower
from fedshuffle.auditing.adapters.log import read_log

__all__ = ["Aggregator", "Flower", "Function", "Replies", "read_log"]
