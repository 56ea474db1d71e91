"""Decoding of small Qwen2 and Llama models, whose cost is the number of operations rather than their size.

The arithmetic is that of transformers' modules with a third of the calls: projections of the same input are one matrix,
the attention scale is part of the query weights, and keys and values are not copied.  Attention with one query per row
is a matrix product over the columns; on CPUs, scaled_dot_product_attention takes several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from policies.adapters import dense_bias, dense_weight
from policies.decoding import Logits, RingDecoder, has_plain_cache

_LARGEST_BYTES = 256 << 20  # of weights: in larger models products dominate, and the fused copy would waste memory
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # types whose tables do not depend on the sequence


def is_lean(model: PreTrainedModel, width: int) -> bool:
    """Returns whether `LeanDecoder` supports the model."""
    if type(model) not in (Qwen2ForCausalLM, LlamaForCausalLM) or not has_plain_cache(model, width):
        return False
    if getattr(model.config, "attention_bias", False) or getattr(model.config, "mlp_bias", False):
        return False  # only queries, keys and values may have biases
    if model.dtype != torch.float32:  # transformers computes some steps of lower precisions in float32
        return False
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return size <= _LARGEST_BYTES and model.model.rotary_emb.rope_type in _FIXED_ROPE


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one block, transposed for x @ w."""

    norm: Tensor  # [d]
    qkv: Tensor  # [d, (heads + 2 kv heads) * head size]; queries include the attention scale
    qkv_bias: Tensor | None
    out: Tensor  # [heads * head size, d]
    mlp_norm: Tensor  # [d]
    gate_up: Tensor  # [d, 2 * intermediate]
    down: Tensor  # [intermediate, d]


def _fuse(block: Qwen2DecoderLayer) -> _Layer:
    attention, mlp = block.self_attn, block.mlp
    projections, scales = [attention.q_proj, attention.k_proj, attention.v_proj], [float(attention.scaling), 1.0, 1.0]
    biases = [dense_bias(linear) for linear in projections]
    qkv_bias = None if biases[0] is None else torch.cat([bias * s for bias, s in zip(biases, scales, strict=True)])  # pyright: ignore[reportOptionalOperand]
    gate_up = _join([mlp.gate_proj, mlp.up_proj], [1.0, 1.0])
    norms = block.input_layernorm.weight.detach(), block.post_attention_layernorm.weight.detach()
    out, down = _join([attention.o_proj], [1.0]), _join([mlp.down_proj], [1.0])
    return _Layer(norms[0], _join(projections, scales), qkv_bias, out, norms[1], gate_up, down)


def _join(linears: Sequence[nn.Module], scales: Sequence[float]) -> Tensor:
    weight = torch.cat([dense_weight(linear) * s for linear, s in zip(linears, scales, strict=True)])
    return weight.t().contiguous()


class LeanDecoder(RingDecoder):
    """Rows in a ring, stepped with fused weights; the model's forward pass reads prompts."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, max_num_seqs: int, width: int, masked: Logits) -> None:
        """Copies the current weights, with adapters merged."""
        super().__init__(model, max_num_seqs, width, masked)
        trunk, config = model.model, model.config
        self._embedding, self._head = trunk.embed_tokens.weight.detach(), dense_weight(model.lm_head).detach().t()
        self._layers = [_fuse(cast(Qwen2DecoderLayer, block)) for block in trunk.layers]
        self._norm, self._eps = trunk.norm.weight.detach(), trunk.norm.variance_epsilon
        act = trunk.layers[0].mlp.act_fn
        self._act = F.silu if isinstance(act, nn.SiLU) or config.hidden_act in ("silu", "swish") else act
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_size = trunk.layers[0].self_attn.head_dim
        self._cos, self._sin = _rotary_tables(model, width)

    def _logits(self, tokens: Tensor, column: int) -> Tensor:
        n, eps = len(tokens), self._eps
        positions = self.positions[:n]
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        hidden = self.hidden[:n, None, None]
        x = self._embedding[tokens]
        for number, layer in enumerate(self._layers):
            y = F.rms_norm(x, layer.norm.shape, layer.norm, eps)
            qkv = y @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, y, layer.qkv)
            x = torch.addmm(x, self._attend(qkv, number, column, cos, sin, hidden), layer.out)
            y = F.rms_norm(x, layer.mlp_norm.shape, layer.mlp_norm, eps)
            gate, up = (y @ layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, self._act(gate) * up, layer.down)
        return F.rms_norm(x, self._norm.shape, self._norm, eps) @ self._head

    def _attend(self, qkv: Tensor, layer: int, column: int, cos: Tensor, sin: Tensor, hidden: Tensor) -> Tensor:
        """Writes this step's keys and values and returns the attention output, [n, heads * head size]."""
        n, half = len(qkv), self._head_size // 2
        qkv = qkv.view(n, -1, self._head_size)
        unrotated = qkv[:, : self._heads + self._kv_heads]
        # rotate_half(x) is x rolled by half its size; its sign is in the sine table
        rotated = torch.addcmul(unrotated * cos, unrotated.roll(half, -1), sin)
        keys, values = self.keys[layer], self.values[layer]
        keys[:n, :, column] = rotated[:, self._heads :]
        values[:n, :, column] = qkv[:, self._heads + self._kv_heads :]
        queries = rotated[:, : self._heads].view(n, self._kv_heads, -1, self._head_size)
        scores = torch.matmul(queries, keys[:n].transpose(2, 3)).add_(hidden)
        return torch.matmul(scores.softmax(-1), values[:n]).view(n, -1)


@torch.inference_mode()
def _rotary_tables(model: PreTrainedModel, width: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and signed sines of positions 0..W-1, [W, head size] each."""
    weight = model.model.embed_tokens.weight
    cos, sin = model.model.rotary_emb(weight[:1, None], torch.arange(width, device=weight.device)[None])
    half = cos.shape[-1] // 2
    return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
