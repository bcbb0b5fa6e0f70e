"""Engines: they do the walking."""

from __future__ import annotations

from fedshuffle.engines.auto import Choice, choose
from fedshuffle.engines.base import Engine
from fedshuffle.engines.lanes import LanesEngine
from fedshuffle.engines.lean import LeanEngine
from fedshuffle.engines.loop import LoopEngine
from fedshuffle.engines.names import again, at_address, check, make
from fedshuffle.engines.problem import Loss, Problem
from fedshuffle.engines.ray import Ray, RayEngine
from fedshuffle.engines.workers import ProcessesEngine, ThreadsEngine

__all__ = [
    "Choice",
    "Engine",
    "LanesEngine",
    "LeanEngine",
    "LoopEngine",
    "Loss",
    "Problem",
    "ProcessesEngine",
    "Ray",
    "RayEngine",
    "ThreadsEngine",
    "again",
    "at_address",
    "check",
    "choose",
    "make",
]
