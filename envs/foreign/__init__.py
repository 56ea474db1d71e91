"""Simulators whose versions do not go with those of runs: rows in an environment and processes of their own."""
