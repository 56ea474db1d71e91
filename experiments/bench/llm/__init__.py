"""GRPO on arithmetic: our trainer compared with TRL and with a no-framework baseline."""
