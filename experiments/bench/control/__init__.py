"""Learning from transitions, and two levels of policies: curves over seeds."""
