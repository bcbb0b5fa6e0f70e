"""Adapters: other people's servers in the form that the black-box audit needs."""

from __future__ import annotations

from fedshuffle.auditing.adapters.base import Aggregator, FunctionAggregator, Replies
from fedshuffle.auditing.adapters.flower import FlowerAggregator
from fedshuffle.auditing.adapters.log import read_log

__all__ = ["Aggregator", "FlowerAggregator", "FunctionAggregator", "Replies", "read_log"]
