"""OpenVLA's way to act: one token per action dimension, each predicted from all before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from policies.openvla.log_probs import TokenDistribution, action_log_probs
from policies.openvla.network import OpenVLA, causal_mask
from policies.openvla.prompt import TokenRows


@dataclass(frozen=True, slots=True)
class Decoded:
    """What decoding gives.

    Attributes:
        tokens: ids, int64 [B, A].
        log_probs: of them under the distribution that they were chosen from, float32 [B, A].
        hidden: the final states that predicted them, [B, A, D].
    """

    tokens: Tensor
    log_probs: Tensor
    hidden: Tensor


@torch.no_grad()
def decode(
    network: OpenVLA,
    rows: TokenRows,
    pixel_values: Tensor,
    num_tokens: int,
    distribution: TokenDistribution,
    uniforms: Tensor | None = None,
) -> Decoded:
    """Chooses action tokens one after the other; keys and values of what came before are kept.

    Args:
        network: the network.
        rows: the prompts, which end in the empty token.
        pixel_values: [B, 6, S, S].
        num_tokens: how many tokens A to choose.
        distribution: what they are drawn from; the likeliest are taken among the tokens that it allows.
        uniforms: [B, A] in [0, 1) to draw by; None for the likeliest tokens.
    """
    sequence = network.sequence(rows, network.patches(pixel_values))
    embeddings, present, positions = sequence.embeddings, sequence.present, sequence.positions
    cache = DynamicCache()
    tokens, log_probs, states = [], [], []
    for step in range(num_tokens):
        mask = causal_mask(present, embeddings.shape[1])
        hidden = network.hidden(embeddings, positions, mask, cache)[:, -1]
        chosen = distribution.choose(hidden, network.output_layer, None if uniforms is None else uniforms[:, step])
        tokens.append(chosen)
        log_probs.append(action_log_probs(hidden, network.output_layer, chosen, distribution)[0])
        states.append(hidden)
        embeddings, positions = network.embed(chosen[:, None]), positions[:, -1:] + 1
        present = torch.cat([present, present.new_ones(len(chosen), 1)], dim=1)
    return Decoded(torch.stack(tokens, 1), torch.stack(log_probs, 1), torch.stack(states, 1))


def predicting_states(network: OpenVLA, rows: TokenRows, pixel_values: Tensor, tokens: Tensor) -> Tensor:
    """Returns the final hidden states [B, A, D] that predict given tokens [B, A], in one pass without a cache."""
    tail = network.embed(tokens[:, :-1])
    sequence = network.sequence(rows, network.patches(pixel_values), tail)
    hidden = network.hidden(sequence.embeddings, sequence.positions, causal_mask(sequence.present))
    return hidden[:, -tokens.shape[1] :]


def score(
    network: OpenVLA, rows: TokenRows, pixel_values: Tensor, tokens: Tensor, distribution: TokenDistribution
) -> tuple[Tensor, Tensor]:
    """Returns (log-probs, entropies in nats) [B, A] of given tokens, with gradients; see `action_log_probs`."""
    hidden = predicting_states(network, rows, pixel_values, tokens)
    return action_log_probs(hidden, network.output_layer, tokens, distribution)
