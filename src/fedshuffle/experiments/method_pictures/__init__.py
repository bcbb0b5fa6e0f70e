"""Experiment: method pictures."""
