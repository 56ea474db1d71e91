"""Every ManiSkill task on the batched backend, beside stock ManiSkill."""
