"""A small causal transformer like Llama: rotary positions, RMS norm, gated MLPs.

Architecture, names and initialisation equal those of `transformers.LlamaModel` bit for bit (tested), without importing
transformers, which takes seconds in every process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KeyValue = tuple[Tensor, Tensor]
_THETA, _EPS, _INIT_STD = 10_000.0, 1e-6, 0.02


class Transformer(nn.Module):
    """Maps a sequence [B, T, d] to hidden states [B, T, d], with causal attention."""

    frequencies: Tensor

    def __init__(self, dim: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(1, dim)
        self.layers = nn.ModuleList([_Layer(dim, num_heads) for _ in range(num_layers)])
        self.norm = _RMSNorm(dim)
        frequencies = 1.0 / (_THETA ** (torch.arange(0, dim // num_heads, 2, dtype=torch.float) / (dim // num_heads)))
        self.register_buffer("frequencies", frequencies, persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0.0, _INIT_STD)
        del self.embed_tokens  # inputs are embeddings; the table was created to draw the same random numbers as Llama

    def forward(self, sequence: Tensor, past: Sequence[KeyValue] = ()) -> Tensor:
        """Returns the hidden states; `past`: each layer's keys and values [B, heads, P, D] of P tokens before them."""
        return self.norm(self._layers(sequence, past)[0])

    def keys_and_values(self, sequence: Tensor) -> list[KeyValue]:
        """Returns each layer's keys and values [B, heads, T, D] of a sequence [B, T, d]."""
        return self._layers(sequence, ())[1]

    def _layers(self, sequence: Tensor, past: Sequence[KeyValue]) -> tuple[Tensor, list[KeyValue]]:
        start, length = past[0][0].shape[2] if past else 0, sequence.shape[1]
        with torch.no_grad():
            places = torch.arange(start, start + length, device=sequence.device)
            angles = places[:, None].float() * self.frequencies
            rotation = torch.cat((angles, angles), dim=-1)
            cos, sin = rotation.cos().to(sequence.dtype), rotation.sin().to(sequence.dtype)
            mask = torch.arange(start + length, device=sequence.device) <= places[:, None] if past else None
        present: list[KeyValue] = []  # torch.compile knows no list[...]()
        for k, layer in enumerate(self.layers):
            sequence, keys_and_values = layer(sequence, cos, sin, past[k] if past else None, mask)
            present.append(keys_and_values)
        return sequence, present


class _Layer(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(dim, num_heads), _GatedMLP(dim, 2 * dim)
        self.input_layernorm, self.post_attention_layernorm = _RMSNorm(dim), _RMSNorm(dim)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, before: KeyValue | None, mask: Tensor | None
    ) -> tuple[Tensor, KeyValue]:
        attended, present = self.self_attn(self.input_layernorm(hidden), cos, sin, before, mask)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), present


class _Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, before: KeyValue | None, mask: Tensor | None
    ) -> tuple[Tensor, KeyValue]:
        heads = (*hidden.shape[:-1], -1, self.head_dim)
        query, key, value = (p(hidden).view(heads).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        if before is not None:
            key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
        causal, scale = mask is None, self.head_dim**-0.5
        output = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale)
        return self.o_proj(output.transpose(1, 2).contiguous().reshape(hidden.shape)), (key, value)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    return heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), dim=-1) * sin


class _GatedMLP(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(dim, inner, bias=False), nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class _RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)
        return self.weight * wide.to(hidden.dtype)
