"""FLOPs of a language model by formula: what a run reports of its updates, and MFU is a share of.

Two for each weight that a token meets in a matrix product (a product and a sum), and 4 d n^2 for attention of width d
over n tokens, causal or not, as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, B).  A backward pass takes twice as
much, or once as much for weights that are not trained.  Recomputed activations are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def update_flops(model: PreTrainedModel, lengths: Sequence[int], predicted: int) -> float:
    """Returns the FLOPs of forward and backward passes over sequences of these lengths.

    Args:
        model: with or without adapters.
        lengths: tokens of prompt and completion of each sequence.
        predicted: tokens of all completions: the output layer makes logits for these only.
    """
    shape, head, total = model.config.get_text_config(), model.get_output_embeddings(), 0.0
    for part in model.modules():
        if isinstance(part, nn.Linear | Conv1D):
            weight, tokens = part.weight, predicted if part is head else sum(lengths)
            total += 2.0 * weight.numel() * tokens * (3 if weight.requires_grad else 2)
    heads = shape.num_attention_heads
    width = heads * (getattr(shape, "head_dim", None) or shape.hidden_size // heads)
    return total + 3 * 4.0 * shape.num_hidden_layers * width * sum(n * n for n in lengths)
