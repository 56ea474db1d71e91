"""Env steps per second of the rollout, beside stock ManiSkill and beside the no-framework baseline."""
