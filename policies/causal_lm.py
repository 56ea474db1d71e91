"""A causal language model from a Hugging Face folder, or a small untrained Qwen2.

Sequences are padded on the right and attention is causal, so real tokens never attend to padding and no mask is
needed: the model uses its fastest attention, and rows of a batch do not influence each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from policies.adapters import inject_adapters, merged_model, without_adapters, write_adapters
from policies.checkpoint_folder import dtype_of, seeded
from policies.decoding import CachedDecoder, has_plain_cache
from policies.language_folder import read_model, special_tokens
from policies.lean_decoding import LeanDecoder, is_lean
from policies.packing import can_pack, packed_row
from policies.text_codec import EOS_ID, PAD_ID, TextCodec
from rlinf_embodied.algorithms.log_probs import (
    chunked_log_probs_and_entropy,
    token_log_probs,
    token_log_probs_and_entropy,
)
from rlinf_embodied.config import LanguagePolicyConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import Decoder, LanguageSpec, TokenBatch, TokenLogProbs
from rlinf_embodied.learning.gradients import checkpoint_blocks, layers_of

_LARGEST_LOGITS = 1 << 26  # elements in one call of the head; more are computed in chunks of tokens


class CausalLM:
    """The model behind the `LanguagePolicy` protocol."""

    def __init__(
        self, model: PreTrainedModel, codec: TextCodec, config: LanguagePolicyConfig | None = None, seed: int = 0
    ) -> None:
        """Wraps a model and its tokenizer; adapters are initialised from the seed.

        Raises:
            CheckpointError: the tokenizer has no token that ends a sequence.
            ConfigError: the adapters do not fit, or the model does not support packing.
        """
        config = config or LanguagePolicyConfig(packing=False)
        self.model = model.eval()  # the plain architecture; adapters sit inside its layers
        pad_id, eos_ids = special_tokens(model, codec.tokenizer)
        self.spec = LanguageSpec(model.config.get_text_config().model_type, pad_id, eos_ids)
        if config.lora.rank:
            inject_adapters(model, config.lora, seed, "policy.lora")
        self.module: nn.Module = model
        self.codec = codec
        self._trunk, self._head = trunk_and_head(model)
        packing = config.packing
        self._packing = bool(packing)
        self._can_pack = (self._packing or (packing is None and torch.cuda.is_available())) and can_pack(model)
        rule = "its layers do not support packed rows, or compute other logits for them"
        require(self._can_pack or not packing, "policy.packing", packing, f"{self.spec.name}: {rule}", "use false")
        self.checkpoints = config.checkpoint_activations
        if self.checkpoints:
            checkpoint_blocks(layers_of(model))
        # FSDP gathers parameters outside layers for calls of the module and of the methods named here
        model.called_as_forward = ("completion_log_probs",)  # pyright: ignore[reportArgumentType]
        model.completion_log_probs = self._log_probs  # pyright: ignore[reportArgumentType]
        # a padding token that also ends sequences must stay possible
        self._never = None if pad_id in eos_ids else torch.tensor([pad_id])

    # ---------------------------------------------------------------------------------------------------- construction
    @classmethod
    def from_config(cls, config: LanguagePolicyConfig, folder: Path | None, seed: int) -> CausalLM:
        codec = TextCodec.from_config(config, folder)
        if folder is None:
            return cls(_tiny(config, len(codec.tokenizer), seed), codec, config, seed)
        return cls(read_model(folder, dtype_of(config.precision)), codec, config, seed)

    @classmethod
    def codec_from_config(cls, config: LanguagePolicyConfig, folder: Path | None) -> TextCodec:
        return TextCodec.from_config(config, folder)

    def save(self, folder: Path, base: str = "", max_shard_bytes: int = 5_000_000_000) -> None:
        """Writes config, weights (adapters merged, unless disabled) and tokenizer for from_pretrained, and adapters."""
        folder.mkdir(parents=True, exist_ok=True)
        transformers_logging.disable_progress_bar()
        merged_model(self.model).save_pretrained(folder, max_shard_size=max_shard_bytes)
        self.codec.tokenizer.save_pretrained(folder)
        self.save_adapters(folder / "adapter", base)

    def save_adapters(self, folder: Path, base: str = "") -> None:
        write_adapters(self.model, folder, base, "CAUSAL_LM")

    # ----------------------------------------------------------------------------------------------------------- model
    def log_probs(
        self, batch: TokenBatch, temperature: float, with_entropy: bool = True, entropy_gradient: bool = True
    ) -> TokenLogProbs:
        """Returns log-probs (and entropy) of the completions' tokens, float32 [B, R], differentiable; 0 elsewhere."""
        return TokenLogProbs(
            *self.module.completion_log_probs(batch, temperature, with_entropy, entropy_gradient)  # pyright: ignore[reportCallIssue]
        )

    @property
    def packs(self) -> bool:
        """Whether passes concatenate the rows of a batch into one."""
        return self._can_pack and (self._packing or next(self.module.parameters()).device.type == "cuda")

    def _log_probs(
        self, batch: TokenBatch, temperature: float, with_entropy: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        vocabulary, mask, packs = self.model.config.get_text_config().vocab_size, batch.mask, self.packs
        hidden = self._trunk(**(packed_row(batch) if packs else {"input_ids": batch.tokens[:, :-1]}))
        start = int(batch.prompt_lengths.min()) - 1
        is_small = (hidden.shape[1] - start) * len(mask) * vocabulary <= _LARGEST_LOGITS
        if is_small and not packs and batch.support is None:
            return self._table_log_probs(hidden[:, start:], batch, temperature, with_entropy, entropy_gradient)
        rows, steps = mask.nonzero(as_tuple=True)  # of each completion token
        predictors = batch.prompt_lengths[rows] - 1 + steps  # position of the token before it, which predicts it
        starts = batch.lengths.cumsum(0) - batch.lengths
        hidden = hidden[0, starts[rows] + predictors] if packs else hidden[rows, predictors]
        targets = batch.tokens[rows, predictors + 1]
        options = (temperature, max(1, _LARGEST_LOGITS // vocabulary), with_entropy, entropy_gradient)
        support = None if batch.support is None else (batch.support[0][rows, steps], batch.support[1])
        head = lambda states: self._masked(self._head(states))  # noqa: E731
        log_probs, entropy = chunked_log_probs_and_entropy(head, hidden, targets, *options, support)
        table = lambda values: values.new_zeros(mask.shape).index_put((rows, steps), values)  # noqa: E731
        return table(log_probs), None if entropy is None else table(entropy)

    def _table_log_probs(
        self, hidden: Tensor, batch: TokenBatch, temperature: float, with_entropy: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Computes all logits at once, for hidden states [B, T, H] that predict the last T tokens of each row."""
        targets, mask = batch.tokens[:, -hidden.shape[1] :], batch.mask
        logits = self._masked(self._head(hidden))
        if with_entropy:
            log_probs, entropy = token_log_probs_and_entropy(logits, targets, temperature, entropy_gradient)
        else:
            log_probs, entropy = token_log_probs(logits, targets, temperature), None
        offsets = batch.prompt_lengths - batch.prompt_lengths.min()
        columns = offsets[:, None] + torch.arange(mask.shape[1], device=mask.device)
        columns = columns.clamp(max=targets.shape[1] - 1)
        align = lambda values: torch.where(mask, values.gather(1, columns), 0.0)  # noqa: E731
        return align(log_probs), None if entropy is None else align(entropy)

    def without_adapters(self) -> AbstractContextManager[None]:
        return without_adapters(self.module)

    def update_flops(self, lengths: Sequence[int], predicted: int) -> float:
        """Returns the FLOPs of forward and backward passes: two for each weight and token of a matrix product.

        Attention of width d over n tokens, causal or not, takes 4 d n^2 (PaLM, Chowdhery et al. 2022, arXiv:2204.02311,
        appendix B).  A backward pass takes twice as much, or once as much for frozen weights.
        """
        shape, head, total = self.model.config.get_text_config(), self.model.get_output_embeddings(), 0.0
        for part in self.model.modules():
            if isinstance(part, nn.Linear | Conv1D):
                tokens = predicted if part is head else sum(lengths)  # logits are computed for completions only
                total += 2.0 * part.weight.numel() * tokens * (3 if part.weight.requires_grad else 2)
        heads = shape.num_attention_heads
        width = heads * (getattr(shape, "head_dim", None) or shape.hidden_size // heads)
        return total + 3 * 4.0 * shape.num_hidden_layers * width * sum(n * n for n in lengths)

    def _masked(self, logits: Tensor) -> Tensor:
        return logits if self._never is None else logits.index_fill(-1, self._never.to(logits.device), -torch.inf)

    def decoder(self, max_num_seqs: int, width: int) -> Decoder:
        """Returns the fastest decoder for the architecture, with room for `max_num_seqs` rows of `width` tokens.

        Raises:
            ConfigError: the model's layers do not cache one key and value per token.
        """
        if is_lean(self.model, width):
            return LeanDecoder(self.model, max_num_seqs, width, self._masked)
        if has_plain_cache(self.model, width):
            return CachedDecoder(self.model, max_num_seqs, width, self._masked)
        raise ConfigError(
            f"policy.folder has a {self.spec.name}, but its layers do not keep one key and value for each of {width} "
            "tokens: use another model, or, for one with a sliding window, shorter prompts and completions"
        )

    def parameters(self) -> list[nn.Parameter]:
        """Returns the trained parameters in a fixed order: all, or the adapters of an adapted model."""
        return [p for p in self.module.parameters() if p.requires_grad]


def trunk_and_head(model: PreTrainedModel) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
    """Returns a model's forward pass in two parts: inputs -> hidden states [B, L, H], and hidden states -> logits.

    If a model's logits are more than one linear layer (a soft cap), the first part returns logits already.
    """
    trunk, linear = model.base_model, model.get_output_embeddings()
    assert isinstance(linear, nn.Module), "a causal language model has a head"
    hidden = lambda **inputs: trunk(use_cache=False, **inputs).last_hidden_state  # noqa: E731
    if model.device.type != "meta":
        with torch.no_grad():
            tokens = torch.ones(1, 2, dtype=torch.long, device=model.device)
            if not torch.equal(linear(hidden(input_ids=tokens)), model(input_ids=tokens, use_cache=False).logits):
                return lambda **inputs: model(use_cache=False, **inputs).logits, lambda logits: logits
    return hidden, linear


def _tiny(config: LanguagePolicyConfig, vocab_size: int, seed: int) -> PreTrainedModel:
    """Initialises linear layers by 1 / sqrt(inputs), residual branches smaller with depth (GPT-2, section 2.3)."""
    shape = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.context_length,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    with seeded(seed, "language model"):
        model = Qwen2ForCausalLM(shape)
        _initialise(model, config.num_layers)
    return model


def _initialise(model: Qwen2ForCausalLM, num_layers: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02 if "embed_tokens" in name else 1.0 / math.sqrt(parameter.shape[1]))
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(1.0 / math.sqrt(2 * num_layers))
