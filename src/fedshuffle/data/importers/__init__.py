"""Importers: one file per format."""
