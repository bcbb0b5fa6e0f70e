"""Settings of the machine that decide the speed of training on a CPU."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from fedshuffle.engines.problem import Problem

_SMALL = 1e9
"""A gradient step of fewer operations is computed on one thread."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # the names of glibc's malloc.h


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc's allocator not to hand freed memory back to the system; whether it listened.

    By default it maps every large activation anew and returns it after the step, which costs an
    LSTM 12,000 page faults a step. This holds for the whole process: its memory stays at its peak.
    Does nothing on systems without glibc, or if ``FEDSHUFFLE_KEEP_MEMORY=0``.
    """
    if not sys.platform.startswith("linux") or os.environ.get("FEDSHUFFLE_KEEP_MEMORY") == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20))
    heard = [mallopt(name, value) == 1 for name, value in settings]
    return all(heard)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Take numbers too small for full precision as zero in this thread, and then no longer.

    A recurrent net that saturates is otherwise five times slower or worse.
    """
    already = bool(torch.tensor(1e-39) * 0.5 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


def cores_here() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def threads_for(problem: Problem, rows: int) -> Iterator[None]:
    """One thread of torch for gradients over so many rows if they are small, then as before.

    Threads that share small work spend their time waiting for each other, and where other programs
    want the cores, too, training is up to a hundred times slower. What is small follows from the
    model and the data alone, so that the same run has the same rounding on every machine.
    """
    before = torch.get_num_threads()
    if before == 1 or operations(problem, rows) >= _SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def operations(problem: Problem, rows: int) -> float:
    """About how many operations the model needs for so many examples, at most.

    Every parameter is used once for every example by linear layers on vectors. Other layers, such
    as convolutions, may use them once for every number of it.
    """
    example = problem.fields[0][0]
    vector = example.ndim <= 1 and example.is_floating_point()
    with_weights = [m for m in problem.model.modules() if any(True for _ in m.parameters(False))]
    linear = all(isinstance(module, nn.Linear) for module in with_weights)
    uses = 1 if linear and vector else max(1, example.numel())
    return 2.0 * rows * uses * sum(p.numel() for p in problem.model.parameters())
