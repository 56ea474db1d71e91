"""A causal language model from a Hugging Face folder, or a small Qwen2-shaped one made from scratch.

Sequences are padded on the right and attention is causal, so a real token never sees padding and no mask is needed:
the model runs its fastest attention, and rows of a batch do not influence each other.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from policies.adapters import add_adapters, merged_model
from policies.char_tokenizer import EOS_ID, PAD_ID, char_tokenizer
from policies.decoding import CachedDecoder, RecomputingDecoder, has_plain_cache
from policies.language_folder import no_progress_bars, read_model, read_tokenizer, special_tokens
from policies.lean_decoding import LeanDecoder, is_lean
from rlinf_embodied.algorithms.log_probs import token_log_probs, token_log_probs_and_entropy
from rlinf_embodied.config import LanguagePolicyConfig, LoraSettings, Precision, TinyLMConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.language import Decoder, LanguageSpec, TokenBatch, TokenLogProbs
from rlinf_embodied.randomness import words


class CausalLM:
    """The model behind the `LanguagePolicy` protocol."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        lora: LoraSettings | None = None,
        seed: int = 0,
        where: str = "the model",
    ) -> None:
        """Wraps a model and its tokenizer; adapters are drawn from the seed.

        Raises:
            CheckpointError: nothing ends a sequence.
            ConfigError: adapters that do not fit.
        """
        self.tokenizer = tokenizer
        self.model = model.eval()  # the plain architecture; adapters sit inside its layers
        pad_id, eos_ids = special_tokens(model, tokenizer, where)
        text = model.config.get_text_config()
        context = getattr(text, "max_position_embeddings", None)
        self.spec = LanguageSpec(text.model_type, text.vocab_size, context, pad_id, eos_ids)
        self.module: nn.Module = model if lora is None else add_adapters(model, lora, seed)
        self._system: list[dict[str, str]] = []  # what a chat begins with
        self._template_args: dict[str, Any] = {}
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        # where one token ends and pads, it must stay possible
        self._never = None if pad_id in eos_ids else torch.tensor([pad_id])

    # ------------------------------------------------------------------------------------------------------------ made
    @classmethod
    def tiny(cls, config: TinyLMConfig, seed: int, lora: LoraSettings | None = None) -> CausalLM:
        """Returns an untrained small model, a function of the seed; the global generator is left as it was."""
        tokenizer = char_tokenizer(config.characters)
        shape = Qwen2Config(
            vocab_size=len(tokenizer),
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
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(words(seed, "language model")) >> 1)
            model = Qwen2ForCausalLM(shape)
            _initialise(model, config.num_layers)
        return cls(model, tokenizer, lora=lora, seed=seed)

    @classmethod
    def load(
        cls, folder: Path, *, lora: LoraSettings | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> CausalLM:
        """Returns the model of a folder with its tokenizer (and chat template), in `dtype`.

        Raises:
            CheckpointError: the folder is incomplete (shards by name) or damaged, or has no usable tokenizer.
            ConfigError: adapters that do not fit.
        """
        model = read_model(folder, dtype)
        return cls(model, read_tokenizer(folder), lora=lora, seed=seed, where=str(folder))

    @classmethod
    def from_config(cls, config: LanguagePolicyConfig, folder: Path | None, seed: int) -> CausalLM:
        lora = config.lora if config.lora.rank else None
        if folder is None:
            policy = cls.tiny(config, seed, lora)
        else:
            dtype = torch.bfloat16 if config.precision is Precision.bfloat16 else torch.float32
            policy = cls.load(folder, lora=lora, seed=seed, dtype=dtype)
        policy.set_chat(config.system_prompt, config.chat_template_args)
        return policy

    def save(self, folder: Path, max_shard_bytes: int = 5_000_000_000) -> None:
        """Writes config, weights (adapters merged) and tokenizer for transformers' from_pretrained."""
        folder.mkdir(parents=True, exist_ok=True)
        with no_progress_bars():
            merged_model(self.model).save_pretrained(folder, max_shard_size=max_shard_bytes)
        self.tokenizer.save_pretrained(folder)

    # ------------------------------------------------------------------------------------------------------------ text
    def set_chat(self, system_prompt: str | None, template_args: Mapping[str, object]) -> None:
        """Sets what prompts are written with beside the problem.

        Args:
            system_prompt: the system's message; None: there is none.
            template_args: what the chat template reads, for example {"enable_thinking": False}.

        Raises:
            ConfigError: the tokenizer has no chat template, or its template reads none of that name.
        """
        template = self.tokenizer.chat_template
        for path, value in (("policy.system_prompt", system_prompt), ("policy.chat_template_args", template_args)):
            rule = "the tokenizer has no chat template that could write it"
            require(not value or template is not None, path, value, rule, "leave it out, or use a chat model's folder")
        unknown = [name for name in template_args if name not in str(template)]
        rule = f"the model's chat template does not read {', '.join(unknown)}"
        require(not unknown, "policy.chat_template_args", dict(template_args), rule, "use names that stand in it")
        self._system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self._template_args = dict(template_args)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt, in the model's chat template where it has one.

        Raises:
            ConfigError: no tokens come out, the tokenizer does not know a character, or its chat template refuses.
        """
        if self.tokenizer.chat_template is None:
            tokens = self._tokens(text, add_special_tokens=True)
        else:
            chat = [*self._system, {"role": "user", "content": text}]
            try:
                written = self.tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=True, **self._template_args
                )
            except TemplateError as error:
                what = "policy.system_prompt with a user's message" if self._system else "a user's message alone"
                raise ConfigError(
                    f"the tokenizer's chat template refuses {what} ({error}): change chat_template in "
                    "the model folder (policy.folder), or use another model"
                ) from error
            tokens = self._tokens(str(written), add_special_tokens=False)  # the template wrote them
        if not tokens:
            raise ConfigError(f"the prompt {text!r} has no tokens: a prompt has at least one; correct the data")
        return tokens

    def encode_completion(self, text: str) -> list[int]:
        """Returns the tokens of an answer and the token that ends it.

        Raises:
            ConfigError: the tokenizer does not know a character.
        """
        return [*self._tokens(text, add_special_tokens=False), self.spec.eos_ids[0]]

    def _tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        except Exception as error:  # the tokenizers library raises nothing finer
            raise ConfigError(
                f"the tokenizer cannot read {text[:200]!r} ({error}): use its characters only, or a model whose "
                "tokenizer knows them all (for the model from scratch: policy.characters)"
            ) from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, special ones left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    # ----------------------------------------------------------------------------------------------------------- model
    def log_probs(
        self, batch: TokenBatch, temperature: float, with_entropy: bool = True, entropy_gradient: bool = True
    ) -> TokenLogProbs:
        """Returns log-probs (and entropy) of the completions' tokens, float32 [B, R], differentiable; 0 elsewhere."""
        start = int(batch.prompt_lengths.min()) - 1
        logits = self._masked(self._logits(batch.tokens[:, :-1], start))
        targets = batch.tokens[:, start + 1 :]
        if with_entropy:
            log_probs, entropy = token_log_probs_and_entropy(logits, targets, temperature, entropy_gradient)
        else:
            log_probs, entropy = token_log_probs(logits, targets, temperature), None
        mask = batch.mask
        places = batch.prompt_lengths[:, None] - 1 - start + torch.arange(mask.shape[1], device=mask.device)
        places = places.clamp(max=targets.shape[1] - 1)
        align = lambda values: torch.where(mask, values.gather(1, places), 0.0)  # noqa: E731
        return TokenLogProbs(align(log_probs), None if entropy is None else align(entropy))

    def _logits(self, tokens: Tensor, start: int) -> Tensor:
        """Logits [B, L - start, V] of what follows each token from `start` on."""
        if self._keeps_logits:
            kept = torch.arange(start, tokens.shape[1], device=tokens.device)
            return self.module(input_ids=tokens, use_cache=False, logits_to_keep=kept).logits
        return self.module(input_ids=tokens, use_cache=False).logits[:, start:]

    def _masked(self, logits: Tensor) -> Tensor:
        return logits if self._never is None else logits.index_fill(-1, self._never.to(logits.device), -torch.inf)

    def decoder(self, max_num_seqs: int, width: int) -> Decoder:
        """Returns memory for so many rows of at most `width` tokens; the fastest one that fits the architecture."""
        if is_lean(self.model, width):
            return LeanDecoder(self.model, max_num_seqs, width, self._masked)
        if has_plain_cache(self.model, width):
            return CachedDecoder(self.model, max_num_seqs, width, self._masked)
        return RecomputingDecoder(self.model, max_num_seqs, width, self.spec.pad_id, self._masked)

    def parameters(self) -> list[nn.Parameter]:
        """Returns what RL trains, in a fixed order: all parameters, or the adapters where there are any."""
        return [p for p in self.module.parameters() if p.requires_grad]


def _initialise(model: Qwen2ForCausalLM, num_layers: int) -> None:
    """Linear layers by 1 / sqrt(inputs), residual branches smaller with depth (Radford et al. 2019, section 2.3)."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02 if "embed_tokens" in name else 1.0 / math.sqrt(parameter.shape[1]))
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(1.0 / math.sqrt(2 * num_layers))
