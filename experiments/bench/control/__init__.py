"""Learning from transitions: curves over seeds, and speed beside Stable-Baselines3."""
