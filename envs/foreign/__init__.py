"""Simulators whose packages conflict with those of runs: rows in processes with a separate virtual environment."""
