"""Algorithms, a module with its config dataclass for each; advantages, log-probabilities and losses of tensors."""
