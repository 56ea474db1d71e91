"""SmolVLA's network (arXiv:2506.01844), built of transformers' SmolVLM and Llama; parameters are named as published.

    images --SigLIP, pixel shuffle--> 64 tokens each --\\
    instruction --words--------------------------------+--> language model, 16 layers: keys and values of each
    state --projection--> 1 token, which sees the rest -/              |
    chunk x with time --MLP--> action expert: even layers attend to these and to actions up to their own,
                               odd ones to these alone, through projections of their own --> velocity

The language model sees neither state nor actions, so its keys and values are made once per observation, and the
expert runs once per step of a chain.  Published times run from data (0) to noise (1), and velocities likewise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, rotate_half
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector, SmolVLMForConditionalGeneration

from policies.smolvla.shape import SmolVLAOptions, read_shapes
from policies.tokenizer import PAD

_ROPE_BASE = 10_000.0  # of the published policy; its language model was trained with another one
_EPS = 1e-5
_PERIODS = (4e-3, 4.0)  # of the embedding of time
_VLM = "vlm_with_expert.vlm."

KeysValues = tuple[Tensor, Tensor]  # [B, key heads, L, head_dim] each, keys rotated
Rotary = tuple[Tensor, Tensor]  # cosines and sines of positions [B, L, head_dim]


@dataclass(frozen=True, slots=True)
class Prefix:
    """What is attended to: keys and values of P tokens by layer, and bool [B, P]: which of them there are."""

    layers: list[KeysValues]
    valid: Tensor


class JointLayer(LlamaDecoderLayer):
    """A layer whose tokens attend to keys and values that they are handed, and to their own."""

    def forward(
        self, hidden: Tensor, seen: KeysValues | None, rotary: Rotary, mask: Tensor
    ) -> tuple[Tensor, KeysValues]:
        """Returns hidden states [B, L, d] and the keys and values attended to; mask is bool [B, 1, 1 or L, P + L]."""
        attention, normed = self.self_attn, self.input_layernorm(hidden)
        query = _rotated(self._heads(attention.q_proj(normed)), rotary)
        keys, values = self._attended(normed, seen, rotary)
        found = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        hidden = hidden + attention.o_proj(found.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), (keys, values)

    def _attended(self, normed: Tensor, seen: KeysValues | None, rotary: Rotary) -> KeysValues:
        keys = _rotated(self._heads(self.self_attn.k_proj(normed)), rotary)
        values = self._heads(self.self_attn.v_proj(normed))
        return (keys, values) if seen is None else (torch.cat([seen[0], keys], 2), torch.cat([seen[1], values], 2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.self_attn.head_dim)).transpose(1, 2)


class CrossLayer(JointLayer):
    """A layer of the expert that attends to what it is handed alone, through projections of it."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        size = cast(int, config.num_key_value_heads) * cast(int, config.head_dim)
        self.self_attn.k_proj = nn.Linear(size, size, bias=False)
        self.self_attn.v_proj = nn.Linear(size, size, bias=False)

    def _attended(self, normed: Tensor, seen: KeysValues | None, rotary: Rotary) -> KeysValues:
        assert seen is not None, "a layer that attends to the language model alone was handed none of it"
        keys, values = (x.transpose(1, 2).flatten(2) for x in seen)
        return self._heads(self.self_attn.k_proj(keys)), self._heads(self.self_attn.v_proj(values))


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = (part[:, None] for part in rotary)
    return x * cos + rotate_half(x) * sin


class VLMWithExpert(nn.Module):
    """The vision-language model and the expert; its output layer and last norm are there, but not computed with."""

    def __init__(self, options: SmolVLAOptions) -> None:
        super().__init__()
        text = _llama_config(options, options.hidden_size, options.intermediate_size)
        expert = _llama_config(options, options.expert_size, options.expert_intermediate_size)
        self.vlm = SmolVLMForConditionalGeneration(_vlm_config(options, text))
        self.lm_expert = LlamaModel(expert)
        self.lm_expert.set_input_embeddings(nn.Identity())  # everything enters as embeddings
        numbers = range(options.num_layers)
        joint = [number % options.self_attention_every == 0 for number in numbers]
        self.vlm.model.text_model.layers = nn.ModuleList([JointLayer(text, number) for number in numbers])
        self.lm_expert.layers = nn.ModuleList(
            [(JointLayer if joint[number] else CrossLayer)(expert, number) for number in numbers]
        )


class SmolVLANet(nn.Module):
    """Everything that is published of a SmolVLA."""

    frequencies: Tensor

    def __init__(self, options: SmolVLAOptions) -> None:
        super().__init__()
        width = options.expert_size
        self.vlm_with_expert = VLMWithExpert(options)
        self.state_proj = nn.Linear(options.max_state_dim, options.hidden_size)
        self.action_in_proj = nn.Linear(options.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, options.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)
        shortest, longest = _PERIODS
        periods = shortest * (longest / shortest) ** torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64)
        self.register_buffer("frequencies", (2.0 * math.pi / periods).float(), persistent=False)

    @property
    def _text(self) -> LlamaModel:
        return self.vlm_with_expert.vlm.model.text_model

    @property
    def _eyes(self) -> tuple[Any, SmolVLMConnector]:  # torch does not type the modules of a module
        return self.vlm_with_expert.vlm.model.vision_model, self.vlm_with_expert.vlm.model.connector

    def see(self, images: Sequence[Tensor]) -> Tensor:
        """Returns the tokens [B, K * T, d] of the images of each camera, uint8 [B, H, W, 3]."""
        vision, connector = self._eyes
        weight, side = vision.embeddings.position_embedding.weight, vision.embeddings.image_size
        pixels = torch.stack([_scaled(shown, side, weight.dtype) for shown in images], 1).flatten(0, 1)
        hidden = vision.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2) + weight
        for layer in vision.encoder.layers:
            hidden = layer(hidden, None)
        return connector(vision.post_layernorm(hidden)).unflatten(0, (-1, len(images))).flatten(1, 2)

    def context(self, vision: Tensor, words: Tensor) -> Prefix:
        """Returns what the language model makes of images' tokens [B, K * T, d] and of words' numbers int64 [B, L]."""
        entered = torch.cat([vision, self._text.embed_tokens(words)], 1) * math.sqrt(vision.shape[-1])
        seen = torch.ones(vision.shape[:2], dtype=torch.bool, device=words.device)
        return self._read(entered, None, torch.cat([seen, words != PAD], 1))

    def prefix(self, context: Prefix, state: Tensor) -> Prefix:
        """Returns the context with a further token, of the state [B, at most max_state_dim]."""
        padded = F.pad(state, (0, self.state_proj.in_features - state.shape[-1])).to(self.state_proj.weight.dtype)
        there = torch.ones_like(context.valid[:, :1])
        return self._read(self.state_proj(padded)[:, None], context, torch.cat([context.valid, there], 1))

    def _read(self, hidden: Tensor, before: Prefix | None, valid: Tensor) -> Prefix:
        positions = valid.cumsum(1)[:, -hidden.shape[1] :] - 1
        rotary, mask, found = self._text.rotary_emb(hidden, positions), valid[:, None, None], []
        for number, layer in enumerate(self._text.layers):
            hidden, attended = layer(hidden, before.layers[number] if before else None, rotary, mask)
            found.append(attended)
        return Prefix(found, valid)

    def hidden(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """Returns the expert's hidden states [B, C, d'] of chunks x [B, C, max_action_dim] at published times [B]."""
        rows, length = x.shape[:2]
        hidden, places = self._entered(x, time), torch.arange(length, device=x.device).expand(rows, -1)
        seen = prefix.valid[:, None, None].expand(-1, 1, length, -1)
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().expand(rows, 1, -1, -1)
        after = self._text.rotary_emb(hidden, prefix.valid.sum(1, keepdim=True) + places), torch.cat([seen, causal], -1)
        alone = self._text.rotary_emb(hidden, places), seen  # positions of layers that see no actions begin at 0
        expert = self.vlm_with_expert.lm_expert
        for number, layer in enumerate(expert.layers):
            rotary, mask = alone if isinstance(layer, CrossLayer) else after
            hidden, _ = layer(hidden, prefix.layers[number], rotary, mask)
        return expert.norm(hidden)

    def _entered(self, x: Tensor, time: Tensor) -> Tensor:
        entered = self.action_in_proj(x.to(self.action_in_proj.weight.dtype))
        angles = time[:, None] * self.frequencies
        embedded = torch.cat([angles.sin(), angles.cos()], 1).to(entered.dtype)[:, None].expand_as(entered)
        return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(torch.cat([entered, embedded], -1))))

    def velocity(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """Returns dx / dt [B, C, A] of chunks x [B, C, A] at times [B], from noise (0) to data (1)."""
        missing = self.action_in_proj.in_features - x.shape[-1]
        velocity = self.action_out_proj(self.hidden(prefix, F.pad(x, (0, missing)), 1.0 - time))
        return -velocity[..., : x.shape[-1]].to(x.dtype)

    def trained(self, language: bool, vision: bool) -> list[nn.Parameter]:
        """Returns the parameters of the expert and of the projections around it, and those of other parts where asked.

        Args:
            language: the language model, but for its last layer, as in the published recipe.
            vision: the vision tower and the projection of what it sees.
        """
        model = f"{_VLM}model."
        last = f"{model}text_model.layers.{len(self._text.layers) - 1}."
        frozen = [f"{_VLM}lm_head.", f"{model}text_model.norm.", last]
        frozen += [] if language else [f"{model}text_model."]
        frozen += [] if vision else [f"{model}vision_model.", f"{model}connector."]
        return [p for name, p in self.named_parameters() if not name.startswith(tuple(frozen))]

    def freeze_others(self, trained: Iterable[nn.Parameter]) -> None:
        """Lets no parameters get gradients but these."""
        self.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)


def meta_network(path: Path, expert_only: bool) -> SmolVLANet:
    """Returns the network of a config.json on the meta device; the expert alone is trained, or all that takes part.

    Raises:
        CheckpointError: see `read_shapes`.
    """
    with torch.device("meta"):
        network = SmolVLANet(read_shapes(path))
    network.freeze_others(network.trained(language=not expert_only, vision=not expert_only))
    return network


def _scaled(images: Tensor, side: int, dtype: torch.dtype) -> Tensor:
    """Returns a camera's images, uint8 [B, H, W, 3], as [B, 3, side, side] in [-1, 1]."""
    pixels = images.permute(0, 3, 1, 2).to(dtype) / 127.5 - 1.0
    if pixels.shape[-2:] == (side, side):
        return pixels
    return F.interpolate(pixels, size=(side, side), mode="bilinear", align_corners=False)


def _llama_config(options: SmolVLAOptions, width: int, intermediate: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=options.vocab_size,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=0,  # JointLayer and CrossLayer take their place
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_kv_heads,
        head_dim=options.head_dim,
        rms_norm_eps=_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_BASE},
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )


def _vlm_config(options: SmolVLAOptions, text: LlamaConfig) -> SmolVLMConfig:
    vision = {
        "hidden_size": options.vision_hidden_size,
        "intermediate_size": options.vision_intermediate_size,
        "num_hidden_layers": options.vision_num_layers,
        "num_attention_heads": options.vision_num_heads,
        "image_size": options.image_size,
        "patch_size": options.patch_size,
    }
    return SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=options.pixel_shuffle)
