"""Small language models of several architectures, with weights large enough for their logits to differ clearly."""

import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from policies.causal_lm import CausalLM
from policies.text_codec import TextCodec, char_tokenizer

V = 25
_COMMON = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 96, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_COMMON, num_key_value_heads=2, tie_word_embeddings=True))


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_COMMON, num_key_value_heads=1, head_dim=16))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, num_key_value_heads=2, head_dim=8))


def _windowed() -> PreTrainedModel:
    """Forgets all but the last 6 tokens in its second layer."""
    shape = Qwen2Config(
        **_COMMON, num_key_value_heads=4, use_sliding_window=True, sliding_window=6, max_window_layers=1
    )
    assert shape.layer_types == ["full_attention", "sliding_attention"]
    return Qwen2ForCausalLM(shape)


def _gpt2() -> PreTrainedModel:
    shape = GPT2Config(
        vocab_size=V, n_positions=96, n_embd=32, n_layer=2, n_head=4, pad_token_id=0, eos_token_id=1, bos_token_id=None
    )
    return GPT2LMHeadModel(shape)


def _bloom() -> PreTrainedModel:
    """Knows positions by its attention mask only."""
    shape = BloomConfig(
        vocab_size=V, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0, eos_token_id=1, bos_token_id=None
    )
    return BloomForCausalLM(shape)


def _gemma3() -> PreTrainedModel:
    """Forgets all but the last 6 tokens in its first layer, and turns these positions at another rate."""
    kinds = ["sliding_attention", "full_attention"]
    shape = Gemma3TextConfig(**_COMMON, num_key_value_heads=2, head_dim=8, sliding_window=6, layer_types=kinds)
    return Gemma3ForCausalLM(shape)


MODELS = {
    "qwen2": _qwen2, "llama": _llama, "qwen3": _qwen3, "gemma3": _gemma3, "windowed": _windowed, "gpt2": _gpt2,
    "bloom": _bloom
}  # fmt: skip


def language_model(name: str, seed: int = 0) -> CausalLM:
    """Returns a policy of this architecture; its weights are drawn large, so that attention matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name]()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.25)
            else:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return CausalLM(model, TextCodec(char_tokenizer(), getattr(model.config, "max_position_embeddings", None)))
