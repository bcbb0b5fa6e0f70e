"""Experiment: the theory's claims, measured."""
