"""Settings of the process that decide the speed of training on a CPU.

Only :func:`keep_freed_memory` lasts; set ``FEDSHUFFLE_KEEP_MEMORY=0`` to switch it off. The others
are in force while an engine computes, and are then undone.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from fedshuffle.engines.problem import Problem

_SMALL = 1e9  # a gradient step of fewer operations is computed on one thread
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # the names of glibc's malloc.h


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc's allocator not to return freed memory to the system; whether it obeyed.

    By default it returns every large activation after the step, which costs an LSTM 12,000 page
    faults per step. This holds for the whole process: its memory stays at its peak.
    """
    if not sys.platform.startswith("linux") or os.environ.get("FEDSHUFFLE_KEEP_MEMORY") == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 << 20))
    return [mallopt(name, value) for name, value in settings] == [1, 1, 1]


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Treat denormal numbers as zero in this thread, and undo that afterwards.

    A recurrent net that saturates is otherwise five times slower or worse.
    """
    already = bool(torch.tensor(1e-39) * 0.5 == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


def available_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch, then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(problem: "Problem", rows: int) -> AbstractContextManager[None]:
    """One thread of torch for gradients over this many rows if they are small, then as before.

    Threads that share small work wait for each other. What is small depends on the model and the
    data alone, so that a run has the same rounding on every machine.
    """
    small = torch.get_num_threads() > 1 and operations(problem, rows) < _SMALL
    return one_thread() if small else nullcontext()


def operations(problem: "Problem", rows: int) -> float:
    """An upper bound of the operations for this many examples.

    Linear layers on vectors use every parameter once per example; other layers, such as
    convolutions, at most once for every number of the example.
    """
    example = problem.fields[0][0]
    vector = example.ndim <= 1 and example.is_floating_point()
    with_weights = [m for m in problem.model.modules() if any(True for _ in m.parameters(False))]
    linear = all(isinstance(module, nn.Linear) for module in with_weights)
    uses = 1 if linear and vector else max(1, example.numel())
    return 2.0 * rows * uses * sum(p.numel() for p in problem.model.parameters())
