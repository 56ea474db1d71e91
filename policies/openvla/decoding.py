"""Tokens from hidden states: what they are drawn from, log-probs, and OpenVLA's way to act, one after the other."""

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
    """The softmax of logits / temperature over the tokens `columns` of the vocabulary; others are never drawn."""

    columns: slice
    temperature: float = 1.0

    def choose(self, hidden: Tensor, output_layer: nn.Linear, uniforms: Tensor | None) -> Tensor:
        """Returns tokens [..] for hidden states [.., D]: drawn by uniforms [..] in [0, 1), or the likeliest ones."""
        logits = self._logits(hidden, output_layer)
        places = logits.argmax(-1) if uniforms is None else sample_tokens(logits, uniforms, self.temperature)
        return places + self.columns.start

    def score(
        self, hidden: Tensor, output_layer: nn.Linear, tokens: Tensor, entropy_gradient: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Returns (log p(token), entropy in nats), float32 [..], of tokens [..] predicted by hidden states [.., D]."""
        logits, places = self._logits(hidden, output_layer), tokens - self.columns.start
        return token_log_probs_and_entropy(logits, places, self.temperature, entropy_gradient)

    def _logits(self, hidden: Tensor, output_layer: nn.Linear) -> Tensor:
        if type(output_layer) is nn.Linear:  # the other columns are never computed
            return F.linear(hidden, output_layer.weight[self.columns])
        return output_layer(hidden)[..., self.columns]  # it has adapters


@torch.no_grad()
def decode(
    network: OpenVLA,
    rows: TokenRows,
    pixel_values: Tensor,
    num_tokens: int,
    distribution: TokenDistribution,
    uniforms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses action tokens one after the other; keys and values of what came before are kept.

    `rows` are the prompts, which end in the empty token, and pixel values are [B, 6, S, S].  Tokens are drawn by
    `uniforms` [B, A] in [0, 1); None: the likeliest.  Returns `num_tokens` of them, int64 [B, A], and the final hidden
    states that predicted them, [B, A, D].
    """
    sequence = network.sequence(rows, network.patches(pixel_values))
    embeddings, present, positions = sequence.embeddings, sequence.present, sequence.positions
    cache, tokens, states = DynamicCache(), [], []
    for step in range(num_tokens):
        mask = causal_mask(present, embeddings.shape[1])
        hidden = network.hidden(embeddings, positions, mask, cache)[:, -1]
        chosen = distribution.choose(hidden, network.output_layer, None if uniforms is None else uniforms[:, step])
        tokens.append(chosen)
        states.append(hidden)
        embeddings, positions = network.embed(chosen[:, None]), positions[:, -1:] + 1
        present = torch.cat([present, present.new_ones(len(chosen), 1)], dim=1)
    return torch.stack(tokens, 1), torch.stack(states, 1)


def predicting_states(network: OpenVLA, rows: TokenRows, pixel_values: Tensor, tokens: Tensor) -> Tensor:
    """Returns the final hidden states [B, A, D] that predict given tokens [B, A], in one pass without a cache."""
    tail = network.embed(tokens[:, :-1])
    sequence = network.sequence(rows, network.patches(pixel_values), tail)
    hidden = network.hidden(sequence.embeddings, sequence.positions, causal_mask(sequence.present))
    return hidden[:, -tokens.shape[1] :]
