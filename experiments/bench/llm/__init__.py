"""GRPO on arithmetic: our trainer beside TRL and beside the no-framework baseline of the same work."""
