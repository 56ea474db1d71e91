"""Attention over rows packed into one: tokens attend only to their own row, and no padding is computed.

    tokens      5 6 7 1 8 9 1        rows [5, 6, 7, 1] and [8, 9, 1]
    positions   0 1 2 3 0 1 2
    cumulative  0       4     7      starts of the rows, and the end

On NVIDIA GPUs the variable-length kernel of torch computes all rows at once, in half precision; elsewhere, and in
float32, attention runs row by row.  Calls without cumulative lengths (decoding) use
transformers' attention.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlinf_embodied.interfaces.language import TokenBatch

_NAME = "rlinf_packed"


def can_pack(model: PreTrainedModel) -> bool:
    """Prepares a model for packed rows; returns whether their logits equal those of single rows, by a test pass."""
    if not model._supports_attention_backend:
        return False
    previous = model.config._attn_implementation or "sdpa"
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    rows = TokenBatch(torch.tensor([[2, 3, 4], [3, 2, 0]]), torch.tensor([1, 1]), torch.tensor([3, 2]))
    device = str(model.device)
    with torch.no_grad():
        packed = model(use_cache=False, **packed_row(rows.to(device))).logits[0, 3:]
        single = model(input_ids=rows.tokens[1:, :2].to(device), use_cache=False).logits[0]
    same = torch.allclose(packed.float(), single.float(), atol=1e-4 if model.dtype is torch.float32 else 0.1, rtol=1e-2)
    if not same:
        model.set_attn_implementation(previous)
    return same


def packed_row(batch: TokenBatch) -> dict[str, Any]:
    """Returns a batch packed into one row, as arguments of a model's forward pass."""
    lengths = batch.lengths
    positions = torch.arange(batch.tokens.shape[1], device=lengths.device).expand_as(batch.tokens)
    real = positions < lengths[:, None]
    cumulative, longest = F.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())
    return {
        "input_ids": batch.tokens[real][None],
        "position_ids": positions[real][None],
        # a mask of four dimensions is passed through, so that none of [T, T] is created
        "attention_mask": torch.zeros(1, 1, 1, 1, device=lengths.device),
        **{"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": longest, "max_length_k": longest},
    }


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Returns the output of heads [B, L, heads, head size]; queries, keys and values are [B, heads, L, head size]."""
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    kind, half = query.device.type, query.dtype
    if torch.is_autocast_enabled(kind):
        half = torch.get_autocast_dtype(kind)
    if kind == "cuda" and half in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        groups = query.shape[1] // key.shape[1]  # repeated, since torch 2.11 has no grouped-query form of this function
        key, value = (part.repeat_interleave(groups, 1) if groups > 1 else part for part in (key, value))
        q, k, v = (part[0].transpose(0, 1).to(half) for part in (query, key, value))
        longest, window = more["max_length_q"], -1 if sliding_window is None else sliding_window - 1
        options: dict[str, Any] = {"scale": more.get("scaling"), "window_size": (window, 0)}
        output = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, longest, longest, **options)
        assert isinstance(output, Tensor)
        return output[None], None
    parts = []
    for start, end in pairwise(cu_seq_lens_q.tolist()):
        q, k, v = (part[:, :, start:end] for part in (query, key, value))
        parts.append(
            sdpa_attention_forward(module, q, k, v, _window(end - start, sliding_window, query.device), **more)[0]
        )
    return torch.cat(parts, dim=1), None


def _window(length: int, width: int | None, device: torch.device) -> Tensor | None:
    """Returns the mask of a sliding window, bool [1, 1, L, L]; None if it covers all tokens."""
    if width is None or length <= width:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return ((distance >= 0) & (distance < width))[None, None]
