"""Settings for all tests."""

from __future__ import annotations

import os
import signal

# Tests run side by side already: torch's own threads would only fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Started in the background of a shell, all would ignore Ctrl-C, by which tests end what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import settings

from tests.chromium import browser  # noqa: F401  one for all files
from tests.flower_deployment import deployment  # noqa: F401  one for all files

# No test may depend on timing. In CI the examples are always the same; elsewhere they vary.
settings.register_profile("fedshuffle", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fedshuffle")
