"""GRPO on arithmetic: our trainer beside TRL and beside the bare cost of the same work."""
