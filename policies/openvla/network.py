"""The network: both vision towers, the projector, and a Llama that reads BOS, the patches, then the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from policies.openvla.config import OpenVLAConfig
from policies.openvla.prompt import TokenRows
from policies.openvla.vision import Projector, VisionBackbone
from rlinf_embodied.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Sequence:
    """The input of the language model."""

    embeddings: Tensor  # [B, S, D]
    present: Tensor  # bool [B, S], false at padding, which nothing attends to

    @property
    def positions(self) -> Tensor:
        """The position of each entry, not counting padding, int64 [B, S]."""
        return (self.present.long().cumsum(1) - 1).clamp(min=0)


class OpenVLA(nn.Module):
    """The network of OpenVLA and of OpenVLA-OFT; parameter names are those of the published files."""

    def __init__(self, config: OpenVLAConfig) -> None:
        """Builds it with random weights.

        Raises:
            CheckpointError: timm or transformers cannot build the network of the config.
        """
        super().__init__()
        self.config = config
        self.vision_backbone = VisionBackbone(config)
        try:
            # only this implementation accepts boolean masks
            fields = cast("dict[str, Any]", {**config.text, "attn_implementation": "sdpa"})
            self.language_model = LlamaForCausalLM(LlamaConfig(**fields))
        except Exception as error:  # the library's errors for wrong fields have no exported base class
            raise CheckpointError(
                f"text_config is {dict(config.text)}, which makes no Llama ({error}): copy config.json again"
            ) from error
        self.projector = Projector(self.vision_backbone.out_features, self.dim)
        self.eval()

    @property
    def dim(self) -> int:
        """The width D of the language model."""
        return cast(int, self.language_model.config.hidden_size)

    @property
    def output_layer(self) -> nn.Linear:
        """The layer from hidden states [.., D] to logits [.., V]."""
        return self.language_model.lm_head

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the embeddings [B, L, D] of token ids."""
        return self.language_model.model.embed_tokens(ids)

    def patches(self, pixel_values: Tensor) -> Tensor:
        """Returns patch embeddings [B, K * P, D] of pixel values [B, K * 6, S, S]."""
        dtype = next(self.projector.parameters()).dtype  # its layers may be wrapped in adapters
        return self.projector(self.vision_backbone(pixel_values.to(dtype)))

    def sequence(self, rows: TokenRows, visual: Tensor, tail: Tensor | None = None) -> Sequence:
        """Returns BOS | visual [B, N, D] | prompt | tail [B, M, D]."""
        text = self.embed(rows.ids)
        visible = torch.ones(visual.shape[:2], dtype=torch.bool, device=visual.device)
        parts, present = [text[:, :1], visual, text[:, 1:]], [rows.present[:, :1], visible, rows.present[:, 1:]]
        if tail is not None:
            parts.append(tail)
            present.append(torch.ones(tail.shape[:2], dtype=torch.bool, device=tail.device))
        return Sequence(torch.cat(parts, 1), torch.cat(present, 1))

    def hidden(self, embeddings: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None = None) -> Tensor:
        """Returns the language model's final hidden states [B, Q, D], after its last norm.

        Args:
            embeddings: [B, Q, D].
            positions: int64 [B, Q], for the rotary embedding.
            mask: bool [B, 1, Q, S], true where a query may attend; S includes the cache.
            cache: keys and values of earlier tokens; it is extended.
        """
        output = self.language_model.model(
            inputs_embeds=embeddings,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state

    def blocks(self) -> list[nn.Module]:
        """Returns the layers of both towers and of the language model."""
        backbone = self.vision_backbone
        towers = [*backbone.featurizer.blocks, *backbone.fused_featurizer.blocks]
        return [*cast("list[nn.Module]", towers), *self.language_model.model.layers]

    def renew_buffers(self) -> None:
        """Recomputes buffers of a network that was built on the meta device, after its weights were loaded."""
        self.language_model.model.rotary_emb = LlamaRotaryEmbedding(self.language_model.config)


def causal_mask(present: Tensor, num_queries: int | None = None) -> Tensor:
    """Returns a mask [B, 1, Q, S] with which the last Q entries attend to present entries up to themselves."""
    length = present.shape[1]
    entries = torch.arange(length, device=present.device)
    queries = entries if num_queries is None else entries[length - num_queries :]
    return (present[:, None, :] & (entries <= queries[:, None]))[:, None]


def full_mask(present: Tensor) -> Tensor:
    """Returns a mask [B, 1, S, S] with which all entries attend to all present entries."""
    return present[:, None, None, :].expand(-1, 1, present.shape[1], -1)
