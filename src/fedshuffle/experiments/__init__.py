"""Experiments: the paper's figures and the demo, through the public API only."""
