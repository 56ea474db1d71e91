"""Every ManiSkill task on the batched backend, compared with stock ManiSkill."""
