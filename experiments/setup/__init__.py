"""Commands that prepare a machine: `python -m experiments.setup.<name>`."""
