"""Advantages, log-probabilities and losses as pure functions of tensors."""
