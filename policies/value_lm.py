"""A critic for completions: a language model's trunk with one value per token instead of logits."""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from policies.adapters import merged_model
from policies.causal_lm import CausalLM
from rlinf_embodied.interfaces.language import TokenBatch
from rlinf_embodied.learning.gradients import checkpoint_blocks, layers_of


class ValueLM(nn.Module):
    """V(prompt and completion so far): a copy of a policy's trunk that shares no parameter with it, and a head."""

    def __init__(self, trunk: PreTrainedModel) -> None:
        """The head starts at 0, so that a new critic returns 0."""
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.config.get_text_config().hidden_size, 1, dtype=trunk.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def module(self) -> nn.Module:
        return self

    @classmethod
    def from_policy(cls, policy: CausalLM) -> ValueLM:
        """Returns a new critic with a copy of the policy's trunk, adapters merged."""
        trunk = cast(PreTrainedModel, copy.deepcopy(merged_model(policy.model).base_model))
        trunk.requires_grad_(True)
        if policy.checkpoints:
            checkpoint_blocks(layers_of(trunk))
        return cls(trunk.float()).eval()  # in float32, since all of it is trained

    def values(self, batch: TokenBatch) -> Tensor:
        """Returns V before each token of the completions, float32 [B, R], differentiable; 0 after them."""
        mask = batch.mask
        hidden = self.trunk(input_ids=batch.tokens[:, :-1], use_cache=False).last_hidden_state
        values = self.head(hidden)[..., 0].to(torch.float32)  # each depends on its token and those before it
        columns = batch.prompt_lengths[:, None] - 1 + torch.arange(mask.shape[1], device=mask.device)
        return torch.where(mask, values.gather(1, columns.clamp(max=values.shape[1] - 1)), 0.0)
