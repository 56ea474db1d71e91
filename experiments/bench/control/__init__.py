"""Learning from transitions: curves over seeds, compared with Stable-Baselines3."""
