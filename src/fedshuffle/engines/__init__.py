"""Engines compute what methods request: local training and full gradients."""

from fedshuffle.engines.base import Engine
from fedshuffle.engines.problem import Loss, Problem
from fedshuffle.engines.ray.engine import Ray, RayEngine
from fedshuffle.engines.reference import ReferenceEngine
from fedshuffle.engines.registry import Choice, at_address, check, choose, make, resumed
from fedshuffle.engines.sequential import SequentialEngine
from fedshuffle.engines.vectorized import VectorizedEngine
from fedshuffle.engines.workers import ProcessesEngine, ThreadsEngine

__all__ = [
    "Choice",
    "Engine",
    "Loss",
    "Problem",
    "ProcessesEngine",
    "Ray",
    "RayEngine",
    "ReferenceEngine",
    "SequentialEngine",
    "ThreadsEngine",
    "VectorizedEngine",
    "at_address",
    "check",
    "choose",
    "make",
    "resumed",
]
