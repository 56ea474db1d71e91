"""Env steps per second of the batched simulator beside stock ManiSkill."""
