"""Learning from transitions: one graph for algorithms with a replay buffer, on the embodied workflow's own stages."""
