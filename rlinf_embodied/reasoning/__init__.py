"""Reasoning-model RL as a workflow of stages on the same core as the embodied one."""
