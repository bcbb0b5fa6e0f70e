"""Settings of the machine that decide the speed of training on a CPU."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
