"""RL training for embodied AI: workflows written once, planned and run anywhere."""
