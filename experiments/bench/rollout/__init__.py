"""Env steps per second of the rollout, compared with stock ManiSkill."""
