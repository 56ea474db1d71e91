"""Workflows of other kinds on the same core, to read and to run: `python -m experiments.examples.<name>`."""
