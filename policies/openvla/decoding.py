"""Sampling and log-probs of action tokens, and OpenVLA's autoregressive decoding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from policies.openvla.network import OpenVLA, causal_mask
from policies.openvla.prompt import TokenRows
from rlinf_embodied.algorithms.log_probs import sample_tokens, token_log_probs_and_entropy


@dataclass(frozen=True, slots=True)
class TokenDistribution:
    """The softmax of logits / temperature over the tokens `columns` of the vocabulary; others are never sampled."""

    columns: slice
    temperature: float = 1.0

    def choose(self, hidden: Tensor, output_layer: nn.Linear, uniforms: Tensor | None) -> Tensor:
        """Returns tokens [..] for hidden states [.., D]: sampled with uniforms [..] in [0, 1), or greedy."""
        logits = self._logits(hidden, output_layer)
        columns = logits.argmax(-1) if uniforms is None else sample_tokens(logits, uniforms, self.temperature)
        return columns + self.columns.start

    def score(
        self, hidden: Tensor, output_layer: nn.Linear, tokens: Tensor, entropy_gradient: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Returns (log p(token), entropy in nats), float32 [..], of tokens [..] predicted by hidden states [.., D]."""
        logits, columns = self._logits(hidden, output_layer), tokens - self.columns.start
        return token_log_probs_and_entropy(logits, columns, self.temperature, entropy_gradient)

    def _logits(self, hidden: Tensor, output_layer: nn.Linear) -> Tensor:
        if type(output_layer) is nn.Linear:  # the other columns are never computed
            return F.linear(hidden, output_layer.weight[self.columns])
        return output_layer(hidden)[..., self.columns]  # a layer with adapters


@torch.no_grad()
def decode(
    network: OpenVLA,
    rows: TokenRows,
    pixel_values: Tensor,
    num_tokens: int,
    distribution: TokenDistribution,
    uniforms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Samples action tokens autoregressively with a key-value cache.

    `rows` are the prompts, which end in the empty token; pixel values are [B, 6, S, S]; `uniforms` [B, A] in [0, 1)
    sample the tokens (None: the most likely ones).  Returns `num_tokens` tokens, int64 [B, A], and the final hidden
    states that predicted them, [B, A, D].
    """
    sequence = network.sequence(rows, network.patches(pixel_values))
    embeddings, present, positions = sequence.embeddings, sequence.present, sequence.positions
    cache, tokens, states = DynamicCache(), [], []
    for step in range(num_tokens):
        mask = causal_mask(present, embeddings.shape[1])
        hidden = network.hidden(embeddings, positions, mask, cache)[:, -1]
        token = distribution.choose(hidden, network.output_layer, None if uniforms is None else uniforms[:, step])
        tokens.append(token)
        states.append(hidden)
        embeddings, positions = network.embed(token[:, None]), positions[:, -1:] + 1
        present = torch.cat([present, present.new_ones(len(token), 1)], dim=1)
    return torch.stack(tokens, 1), torch.stack(states, 1)


def predicting_states(network: OpenVLA, rows: TokenRows, pixel_values: Tensor, tokens: Tensor) -> Tensor:
    """Returns the final hidden states [B, A, D] that predict the tokens [B, A], in one pass without a cache."""
    tail = network.embed(tokens[:, :-1])
    sequence = network.sequence(rows, network.patches(pixel_values), tail)
    hidden = network.hidden(sequence.embeddings, sequence.positions, causal_mask(sequence.present))
    return hidden[:, -tokens.shape[1] :]
