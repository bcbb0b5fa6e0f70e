"""Experiments: the paper's figures, the studies of docs/research, and the demo."""
