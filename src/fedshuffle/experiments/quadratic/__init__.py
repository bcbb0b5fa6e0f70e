"""Experiment: the paper's toy figures."""
