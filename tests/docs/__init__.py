"""Tests of the documentation site. They need the extra ``docs``."""
