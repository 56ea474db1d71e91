"""Examples of a custom env, policy, reward and workflow; some are commands: `python -m experiments.examples.<name>`."""
