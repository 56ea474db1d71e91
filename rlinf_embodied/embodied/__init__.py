"""The embodied workflow: simulators, VLA policies, PPO and GRPO."""
