"""Settings for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# No test may depend on timing. In CI the examples are always the same; elsewhere they vary.
settings.register_profile("fedshuffle", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fedshuffle")
