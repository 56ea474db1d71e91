"""Measurements, each a command: `python -m experiments.bench.<name>` in the root of the repository."""
