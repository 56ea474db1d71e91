"""The networks of pi0, pi0.5 and SmolVLA on transformers' layers; parameters have the names that LeRobot publishes.

    images --vision tower--> tokens --\\
    prompt --embedding--------------- language model: keys and values of each layer = the prefix
    state ---------------------------/ (SmolVLA)          |
    [state (pi0)] chunk x, time t --> action expert, whose layers attend to the prefix and to themselves --> velocity

              order of the sequence                             attention beyond the prefix
    pi0       cameras, text | state | actions                   state: itself; actions: the state and all actions
    pi05      cameras, text with the state's digits | actions   actions: all; time scales and shifts every norm
    smolvla   cameras, text | state | actions                   actions: causal; none in cross layers

Time runs from noise (1) to actions (0) here, as in LeRobot.  A position is the number of valid tokens before it.
Sources: LeRobot 0.6.1, arXiv:2410.24164 (pi0), 2504.16054 (pi0.5), 2506.01844 (SmolVLA).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GemmaConfig, LlamaConfig, SiglipVisionConfig, SiglipVisionModel
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, rotate_half
from transformers.models.siglip.modeling_siglip import SiglipVisionEmbeddings
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector, SmolVLMVisionTransformer

from policies.pi.config import Family, PiConfig, TowerSizes

# cuDNN's attention fails for SigLIP's heads of 72 in bfloat16 (torch 2.11 on an H200)
torch.backends.cuda.enable_cudnn_sdp(False)

_ROPE_BASE = 10_000.0  # of all three families, regardless of the backbone's config
_MASKED = -2.3819763e38  # as in openpi: a fully masked row attends to everything equally instead of giving NaN
_Config = TypeVar("_Config", GemmaConfig, LlamaConfig)
KeysValues = tuple[Tensor, Tensor]  # [B, key heads, L, head_dim] each, keys rotated


@dataclass(frozen=True, slots=True)
class Prefix:
    """The keys, values and state that the expert reads."""

    layers: list[KeysValues]  # of P tokens, for each layer of the language model
    valid: Tensor  # bool [B, P], false at padding and missing cameras, which are masked
    hidden: Tensor | None = None  # [B, P, width]: the language model's output, which no action depends on
    state: Tensor | None = None  # [B, max_state_dim]: of pi0, whose expert reads it


@dataclass(frozen=True, slots=True)
class Suffix:
    """The input of the expert."""

    embeddings: Tensor  # [B, S, width of the expert]
    sees: Tensor  # bool [S, S]: attention mask among them
    condition: Tensor | None = None  # [B, width], for the expert's norms


# --------------------------------------------------------------------------------------------------------------- layers
class AdaptiveNorm(nn.Module):
    """An RMS norm whose scale and shift, and a gate of the next residual, are linear in a condition (adaRMS)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps, self.dense = eps, nn.Linear(width, 3 * width)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x [B, L, width] normed, and the gate [B, 1, width]."""
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        scale, shift, gate = self.dense(condition.to(self.dense.weight.dtype))[:, None].chunk(3, -1)
        return (normed * (1 + scale.float()) + shift.float()).type_as(x), gate.type_as(x)


def _normed(norm: nn.Module, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
    return norm(x, condition) if isinstance(norm, AdaptiveNorm) else (norm(x), 1.0)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Applies rotary embeddings to heads [B, H, L, D] at positions [B, L]: angles are position * 10000^(-2 i / D)."""
    size = x.shape[-1]
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=x.device) / size
    angles = (positions[:, None, :, None].float() / _ROPE_BASE**exponents).repeat(1, 1, 1, 2)
    return x * angles.cos().to(x.dtype) + rotate_half(x) * angles.sin().to(x.dtype)


def placed(valid: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns all valid tokens, bool [B, P + L], and positions [B, L] and masks [B, L, P + L] of new tokens.

    `valid` [B, L] is false at padding, which has no position and is masked in both directions; `before` [B, P] marks
    the valid earlier tokens.
    """
    whole = valid if before is None else torch.cat([before, valid], 1)
    positions = (whole.long().cumsum(1) - 1)[:, -valid.shape[1] :]
    return whole, positions, whole[:, None, :] & valid[:, :, None]


class _Attends(nn.Module):
    """A decoder layer whose tokens attend to given keys and values, and to their own."""

    self_attn: Any
    mlp: Any
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def forward(
        self, x: Tensor, before: KeysValues | None, positions: Tensor, sees: Tensor, condition: Tensor | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Returns hidden states [B, L, width], and all keys and values; the mask `sees` is bool [B, L, P + L]."""
        attention = self.self_attn
        normed, gate = _normed(self.input_layernorm, x, condition)
        normed = normed.to(attention.q_proj.weight.dtype)
        query = rotated(self._heads(attention.q_proj(normed)), positions)
        keys, values = self._attended(normed, before, positions)
        mask = torch.where(sees[:, None], 0.0, _MASKED).to(query.dtype)
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        x = x + gate * attention.o_proj(output.transpose(1, 2).flatten(2))
        normed, gate = _normed(self.post_attention_layernorm, x, condition)
        return x + gate * self.mlp(normed.to(attention.q_proj.weight.dtype)), (keys, values)

    def _attended(self, normed: Tensor, before: KeysValues | None, positions: Tensor) -> KeysValues:
        keys = rotated(self._heads(self.self_attn.k_proj(normed)), positions)
        values = self._heads(self.self_attn.v_proj(normed))
        if before is None:
            return keys, values
        earlier = [part.to(keys.dtype) for part in before]
        return torch.cat([earlier[0], keys], 2), torch.cat([earlier[1], values], 2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.self_attn.head_dim)).transpose(1, 2)


class GemmaLayer(_Attends, GemmaDecoderLayer):
    """A layer of PaliGemma's language model or of pi0's expert."""


class AdaptiveGemmaLayer(GemmaLayer):
    """A layer of pi0.5's expert."""

    def __init__(self, config: GemmaConfig, index: int) -> None:
        super().__init__(config, index)
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, AdaptiveNorm(config.hidden_size, config.rms_norm_eps))


class LlamaLayer(_Attends, LlamaDecoderLayer):
    """A layer of SmolVLM2's language model, or of SmolVLA's expert with attention to actions."""


class CrossLayer(LlamaLayer):
    """A layer of SmolVLA's expert that attends only to the prefix, through projections of its keys and values."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        size = self.self_attn.k_proj.out_features
        self.self_attn.k_proj = nn.Linear(size, size, bias=False)
        self.self_attn.v_proj = nn.Linear(size, size, bias=False)

    def _attended(self, normed: Tensor, before: KeysValues | None, positions: Tensor) -> KeysValues:
        assert before is not None, "a cross layer needs a prefix"
        attention = self.self_attn
        keys, values = (x.transpose(1, 2).flatten(2).to(attention.k_proj.weight.dtype) for x in before)
        return self._heads(attention.k_proj(keys)), self._heads(attention.v_proj(values))


class Tower(nn.Module):
    """Layers and a last norm, with `embed_tokens` if there is a vocabulary."""

    layers: Any  # torch does not type the modules of a module
    norm: Any

    def __init__(self, layers: Iterable[nn.Module], norm: Any, vocabulary: int | None = None) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm
        if vocabulary is not None:
            self.embed_tokens = nn.Embedding(vocabulary, norm.weight.numel())

    def read(self, embeddings: Tensor, valid: Tensor, before: Prefix | None = None) -> Prefix:
        """Returns the keys and values of `before` and of tokens [B, L, width], which attend to all valid tokens.

        Hidden states are float32 whatever the weights are, since most of bfloat16's error would come from their sums.
        """
        whole, positions, sees = placed(valid, None if before is None else before.valid)
        x, layers = embeddings.float(), []
        for number, layer in enumerate(self.layers):
            x, attended = layer(x, None if before is None else before.layers[number], positions, sees)
            layers.append(attended)
        return Prefix(layers, whole, self.norm(x))


def _sized(kind: type[_Config], sizes: TowerSizes, eps: float) -> _Config:
    return kind(
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp_dim,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=eps,
    )


def _below(root: str, *names_and_modules: Sequence[Any]) -> nn.ModuleDict:
    """Returns nested modules for dotted names below a root; sequences of names and of modules alternate."""
    tree = nn.ModuleDict()
    for names, modules in zip(names_and_modules[::2], names_and_modules[1::2], strict=True):
        for name, module in zip(names, modules, strict=True):
            *parents, last = name.removeprefix(f"{root}.").split(".")
            node = tree
            for part in parents:
                node[part] = node[part] if part in node else nn.ModuleDict()
                node = cast(nn.ModuleDict, node[part])
            node[last] = module
    return tree


# ------------------------------------------------------------------------------------------------------------- networks
class FlowNetwork(nn.Module):
    """Base of the three families; see `Pi0` and `SmolVLA`."""

    _parts: ClassVar[tuple[str, str, str, str]]  # names of language model, expert, vision tower and its projector
    action_time_mlp_in: Any
    action_time_mlp_out: Any
    _unused: ClassVar[tuple[str, ...]]  # names of published but unused parts

    def __init__(self, config: PiConfig) -> None:
        super().__init__()
        self.config, width = config, config.expert.width
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, config.max_action_dim)

    @property
    def text(self) -> Tower:
        """The language model."""
        return cast(Tower, self.get_submodule(self._parts[0]))

    @property
    def expert(self) -> Tower:
        return cast(Tower, self.get_submodule(self._parts[1]))

    @property
    def vision(self) -> list[Any]:
        """The vision tower, and the projector to the width of the language model."""
        return [self.get_submodule(name) for name in self._parts[2:]]

    def blocks(self) -> list[nn.Module]:
        """The layers of all towers."""
        return [*self.text.layers, *self.expert.layers, *self.vision[0].encoder.layers]

    def look(self, images: Tensor) -> Tensor:
        """Returns the tokens [B, T, width] of images [B, 3, H, W] in [-1, 1], of the size that the config names."""
        tower, projector = self.vision
        pixels = images.to(next(tower.parameters()).dtype)
        return projector(tower(pixel_values=pixels).last_hidden_state)

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the embeddings [B, L, width] of token ids, times the square root of the width."""
        weight = self.text.embed_tokens.weight
        return F.embedding(ids, weight) * torch.tensor(weight.shape[1] ** 0.5, dtype=weight.dtype, device=ids.device)

    def sequence(
        self, seen: Sequence[Tensor], shown: Sequence[Tensor], ids: Tensor, present: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the embeddings [B, P, width] of cameras and text, and which of them are valid, bool [B, P].

        `seen` are the tokens of each camera from `look`, missing cameras last, and `shown`, bool [B] each, is false for
        missing ones; `ids` are the prompt's, int64 [B, L], and `present`, bool [B, L], is false at padding.
        """
        masks = [mask[:, None].expand(tokens.shape[:2]) for tokens, mask in zip(seen, shown, strict=True)]
        parts = [*self._surrounded(list(zip(seen, masks, strict=True))), (self.embed(ids), present)]
        embeddings, valid = zip(*parts, strict=True)
        return torch.cat(embeddings, 1), torch.cat(valid, 1)

    def _surrounded(self, images: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Returns the tokens of images and their masks, with any special tokens of the family."""
        return images

    def context(self, images: Sequence[Tensor], shown: Sequence[Tensor], ids: Tensor, present: Tensor) -> Prefix:
        """Returns the language model's prefix of images and prompt; if it is frozen, this can be computed once."""
        return self.text.read(*self.sequence([self.look(each) for each in images], shown, ids, present))

    def prefix(self, context: Prefix, state: Tensor) -> Prefix:
        """Returns a context with the state [B, max_state_dim] added, unless it is part of the prompt."""
        raise NotImplementedError

    def time_embedding(self, time: Tensor) -> Tensor:
        """Returns sines and cosines [B, width of the expert] of times [B], with geometrically spaced periods."""
        (shortest, longest), width = self.config.periods, self.config.expert.width
        fractions = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
        angles = time.double()[:, None] * (2 * math.pi / (shortest * (longest / shortest) ** fractions))
        return torch.cat([angles.sin(), angles.cos()], 1).float()

    def _timed(self, actions: Tensor, time: Tensor) -> Tensor:
        """Combines embedded actions [B, C, width] with their time embedding [B, width]."""
        both = torch.cat([actions, time[:, None].expand_as(actions)], 2)
        return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both)))

    def suffix(self, prefix: Prefix, x: Tensor, time: Tensor) -> Suffix:
        """Returns the expert's input for chunks x [B, C, max_action_dim] at times [B]."""
        raise NotImplementedError

    def sight(self, prefix: Prefix, suffix: Suffix) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Returns positions [B, S] and mask [B, S, P] for cross layers, then those for others, mask [B, S, P + S]."""
        rows, length = suffix.embeddings.shape[:2]
        positions = torch.arange(length, device=prefix.valid.device).expand(rows, -1)
        to_prefix = prefix.valid[:, None].expand(-1, length, -1)
        sees = torch.cat([to_prefix, suffix.sees.expand(rows, -1, -1)], 2)
        return (positions, to_prefix), (prefix.valid.sum(1, keepdim=True) + positions, sees)

    def acting(self, prefix: Prefix, suffix: Suffix) -> Tensor:
        """Returns the expert's hidden states [B, S, width], after its last norm."""
        alone, joint = self.sight(prefix, suffix)
        x, expert = suffix.embeddings.float(), self.expert
        for layer, beside in zip(expert.layers, self.config.expert_at, strict=True):
            positions, sees = alone if isinstance(layer, CrossLayer) else joint
            x, _ = layer(x, prefix.layers[beside], positions, sees, suffix.condition)
        return _normed(expert.norm, x, suffix.condition)[0]

    def hidden(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """Returns the expert's hidden states [B, C, width] of a chunk's actions."""
        return self.acting(prefix, self.suffix(prefix, x, time))[:, -x.shape[1] :].float()

    def velocity(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """Returns v = noise - actions [B, C, max_action_dim] of chunks x at times [B] from noise (1) to actions (0)."""
        return self.action_out_proj(self.hidden(prefix, x, time))

    def trained(self, language: bool, vision: bool) -> list[nn.Parameter]:
        """Returns the parameters of the expert and its projections, and of the language model and vision on request.

        Excludes parameters without a gradient: output layers, and the language model after its last keys and values.
        """
        last_index, layers = self.config.expert_at[-1], self.text.layers
        last = layers[last_index]
        untrained = [*map(self.get_submodule, self._unused), self.text.norm, *layers[last_index + 1 :]]
        untrained += [last.mlp, last.post_attention_layernorm, last.self_attn.q_proj, last.self_attn.o_proj]
        untrained += [] if self.config.train_state else [self.get_submodule("state_proj")]
        untrained += [] if language else [self.text]
        untrained += [] if vision else self.vision
        excluded = {id(parameter) for part in untrained for parameter in part.parameters()}
        return [parameter for parameter in self.parameters() if id(parameter) not in excluded]

    def renew_buffers(self) -> None:
        """Recomputes buffers of a network that was built on the meta device, after its weights were loaded."""
        for module in self.modules():
            if isinstance(module, SiglipVisionEmbeddings):
                device = module.position_embedding.weight.device
                setattr(module, "position_ids", torch.arange(module.num_positions, device=device)[None])  # noqa: B010


class Pi0(FlowNetwork):
    """PaliGemma and an expert of Gemma's layers: pi0, and pi0.5, whose time conditions the expert's norms."""

    _parts = (
        "paligemma_with_expert.paligemma.model.language_model",
        "paligemma_with_expert.gemma_expert.model",
        "paligemma_with_expert.paligemma.model.vision_tower.vision_model",
        "paligemma_with_expert.paligemma.model.multi_modal_projector.linear",
    )
    _unused = ("paligemma_with_expert.paligemma.lm_head", "paligemma_with_expert.gemma_expert.lm_head")

    def __init__(self, config: PiConfig) -> None:
        super().__init__(config)
        eps, width, adaptive = config.norm_eps, config.expert.width, config.family is Family.pi05
        text, expert = _sized(GemmaConfig, config.text, eps), _sized(GemmaConfig, config.expert, eps)
        make, norm = (AdaptiveGemmaLayer, AdaptiveNorm) if adaptive else (GemmaLayer, GemmaRMSNorm)
        read = [GemmaLayer(text, number) for number in range(config.text.depth)]
        act = [make(expert, number) for number in range(config.expert.depth)]
        sizes: dict[str, Any] = {**config.vision, "vision_use_head": False, "attn_implementation": "sdpa"}
        parts = (
            Tower(read, GemmaRMSNorm(config.text.width, eps), config.vocabulary),
            Tower(act, norm(width, eps)),
            SiglipVisionModel(SiglipVisionConfig(**sizes)),
            nn.Linear(config.vision["hidden_size"], config.text.width),
        )
        heads = [nn.Linear(size.width, config.vocabulary, bias=False) for size in (config.text, config.expert)]
        self.paligemma_with_expert = _below("paligemma_with_expert", self._parts, parts, self._unused, heads)
        if adaptive:
            self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(config.max_state_dim, width)
            self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)

    def prefix(self, context: Prefix, state: Tensor) -> Prefix:
        return context if self.config.family is Family.pi05 else replace(context, state=state)

    def suffix(self, prefix: Prefix, x: Tensor, time: Tensor) -> Suffix:
        actions, time, length = self.action_in_proj(x), self.time_embedding(time), x.shape[1]
        if self.config.family is Family.pi05:
            condition = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(time))))
            return Suffix(actions, torch.ones(length, length, dtype=torch.bool, device=x.device), condition)
        actions = self._timed(actions, time)
        sees = torch.ones(length + 1, length + 1, dtype=torch.bool, device=x.device)
        sees[0, 1:] = False  # the state does not attend to the actions
        assert prefix.state is not None, "pi0 reads the state with the actions"
        return Suffix(torch.cat([self.state_proj(prefix.state)[:, None], actions], 1), sees)


class SmolVLA(FlowNetwork):
    """The first layers of SmolVLM2 and a narrower expert of Llama's layers."""

    _parts = (
        "vlm_with_expert.vlm.model.text_model",
        "vlm_with_expert.lm_expert",
        "vlm_with_expert.vlm.model.vision_model",
        "vlm_with_expert.vlm.model.connector",
    )
    _unused = ("vlm_with_expert.vlm.lm_head",)

    def __init__(self, config: PiConfig, special_tokens: tuple[int, int] | None = None) -> None:
        """Takes the token ids around an image and of a whole image, if the config uses them."""
        super().__init__(config)
        self.special_tokens, eps, width = special_tokens, config.norm_eps, config.expert.width
        text, expert = _sized(LlamaConfig, config.text, eps), _sized(LlamaConfig, config.expert, eps)
        vision = {**config.vision, "attn_implementation": "sdpa"}
        whole = SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=config.scale_factor)
        read = [LlamaLayer(text, number) for number in range(config.text.depth)]
        beside = enumerate(config.expert_at)
        act = [(CrossLayer if config.crosses(place) else LlamaLayer)(expert, number) for number, place in beside]
        parts = (
            Tower(read, LlamaRMSNorm(config.text.width, eps), config.vocabulary),
            Tower(act, LlamaRMSNorm(width, eps)),
            SmolVLMVisionTransformer(cast("Any", whole.vision_config)),
            SmolVLMConnector(whole),
        )
        head = nn.Linear(config.text.width, config.vocabulary, bias=False)
        self.vlm_with_expert = _below("vlm_with_expert", self._parts, parts, self._unused, [head])
        self.state_proj = nn.Linear(config.max_state_dim, config.text.width)
        self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)

    def _surrounded(self, images: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Scales image tokens; the special tokens around them are not scaled and always valid."""
        scaled = [(tokens * math.sqrt(tokens.shape[2]), mask) for tokens, mask in images]
        if self.special_tokens is None:
            return scaled
        weight, rows = self.text.embed_tokens.weight, len(images[0][1])
        around, whole = self.special_tokens
        first, last = (
            (weight[numbers].expand(rows, -1, -1), images[0][1].new_ones(rows, len(numbers)))
            for numbers in ([around, whole], [around])
        )
        return [part for image in scaled for part in (first, image, last)]

    def prefix(self, context: Prefix, state: Tensor) -> Prefix:
        token = self.state_proj(state.to(self.state_proj.weight.dtype))[:, None]
        return self.text.read(token, torch.ones_like(context.valid[:, :1]), context)

    def suffix(self, prefix: Prefix, x: Tensor, time: Tensor) -> Suffix:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return Suffix(self._timed(self.action_in_proj(x), self.time_embedding(time)), causal)


def new_network(config: PiConfig, special_tokens: tuple[int, int] | None = None) -> FlowNetwork:
    """Returns a network with random weights; on torch's meta device it needs no memory."""
    return SmolVLA(config, special_tokens) if config.family is Family.smolvla else Pi0(config)


def keep_float32(name: str) -> bool:
    """Whether a parameter stays float32 in a network of bfloat16, as in LeRobot: norms, vision, outer projections."""
    tower = name.startswith(("paligemma_with_expert.", "vlm_with_expert."))
    return not tower or any(part in name for part in ("vision_", "multi_modal_projector", "connector", "norm"))
