"""Experiment: characteristics."""
