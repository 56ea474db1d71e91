"""How fast weights go from one worker to others of its node."""
