"""Settings for all tests."""

from __future__ import annotations

import os

# Tests run side by side already: torch's own threads would only fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# No test may depend on timing. In CI the examples are always the same; elsewhere they vary.
settings.register_profile("fedshuffle", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fedshuffle")
