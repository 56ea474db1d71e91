"""What prepares a machine and the files that production reads: `python -m experiments.setup.<name>`."""
