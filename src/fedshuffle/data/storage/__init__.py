"""Federations on disk: memory-mapped arrays, written atomically."""
