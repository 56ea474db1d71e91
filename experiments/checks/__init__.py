"""What this machine computes beside what the repository says: `python -m experiments.checks.golden`."""
