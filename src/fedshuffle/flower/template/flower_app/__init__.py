"""Handwritten digits, learnt where they are."""
