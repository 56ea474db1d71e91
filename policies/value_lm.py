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


class ValueNet(nn.Module):
    """Trunk and head."""

    def __init__(self, trunk: PreTrainedModel) -> None:
        """The head starts at 0, so that a new critic returns 0."""
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.config.get_text_config().hidden_size, 1, dtype=trunk.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns one value per token, [B, L], which depends on it and the tokens before it."""
        return self.head(self.trunk(input_ids=tokens, use_cache=False).last_hidden_state)[..., 0]


class ValueLM:
    """V(prompt and completion so far): a copy of a policy's trunk that shares no parameter with it."""

    def __init__(self, module: ValueNet) -> None:
        self.module = module.eval()

    @classmethod
    def from_policy(cls, policy: CausalLM) -> ValueLM:
        """Returns a new critic with a copy of the policy's trunk, adapters merged."""
        trunk = cast(PreTrainedModel, copy.deepcopy(merged_model(policy.model).base_model))
        trunk.requires_grad_(True)
        if policy.checkpoints:
            checkpoint_blocks(layers_of(trunk))
        return cls(ValueNet(trunk.float()))  # in float32, since all of it is trained

    def values(self, batch: TokenBatch) -> Tensor:
        """Returns V before each token of the completions, float32 [B, R], differentiable; 0 after them."""
        mask = batch.mask
        values = self.module(batch.tokens[:, :-1]).to(torch.float32)
        columns = batch.prompt_lengths[:, None] - 1 + torch.arange(mask.shape[1], device=mask.device)
        return torch.where(mask, values.gather(1, columns.clamp(max=values.shape[1] - 1)), 0.0)
