"""One training run of any workflow: start, iterations, plans, checkpoints, what is left behind."""
