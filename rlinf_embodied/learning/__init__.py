"""How weights change: gradient sums, optimizers, checkpoints, weights on the wire."""
