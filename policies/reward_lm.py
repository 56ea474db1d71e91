"""A frozen reward model: a folder that transformers' AutoModelForSequenceClassification reads, with one label."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from policies.language_folder import read_context, read_model, read_tokenizer
from policies.text_codec import TextCodec
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import CheckpointError, ConfigError
from rlinf_embodied.interfaces.language import TokenBatch


class RewardLM:
    """Scores prompts with their completions by transformers' forward pass."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module.requires_grad_(False).eval()
        pad_id = module.config.get_text_config().pad_token_id
        self.pad_id: int | None = pad_id

    @classmethod
    def check(cls, folder: Path, codec: TextCodec, longest: int) -> None:
        """Checks config and tokenizer, and that sequences of `longest` tokens fit.

        Raises:
            ConfigError: the model has another number of labels, other tokens or too short a context.
        """
        value = str(folder)
        try:
            context, tokenizer = read_context(folder), read_tokenizer(folder)
        except CheckpointError as error:
            raise ConfigError(f"reward.model cannot be used: {error}") from error
        labels = AutoConfig.from_pretrained(folder, local_files_only=True).num_labels
        rule, action = f"its config has {labels} labels, and a score is one", "give a model with num_labels=1"
        require(labels == 1, "reward.model", value, rule, action)
        rule, action = "its tokens are not the policy's, which it reads", "give one trained from the same model"
        require(tokenizer.get_vocab() == codec.tokenizer.get_vocab(), "reward.model", value, rule, action)
        rule = f"its context holds {context} tokens, and prompts with completions have up to {longest}"
        fits = context is None or longest <= context
        action = "use a smaller algorithm.tokens_per_microbatch, or a model with a longer context"
        require(fits, "reward.model", value, rule, action)

    @classmethod
    def load(cls, folder: Path) -> RewardLM:
        """Returns the model of a folder, in float32.

        Raises:
            ConfigError: its weights cannot be read, or lack the score's head.
        """
        try:
            return cls(read_model(folder, torch.float32, AutoModelForSequenceClassification, "reward model"))
        except CheckpointError as error:
            raise ConfigError(f"reward.model cannot be used: {error}") from error

    def scores(self, batch: TokenBatch) -> Tensor:
        """Returns the score of each sequence, float32 [B]; padding is on the right."""
        columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        mask = columns < batch.lengths[:, None]
        tokens = batch.tokens if self.pad_id is None else batch.tokens.where(mask, self.pad_id)
        return self.module(input_ids=tokens, attention_mask=mask.long()).logits[:, 0].to(torch.float32)
