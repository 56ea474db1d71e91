"""Tokens from hidden states: what they are drawn from, their log-probs, and OpenVLA's way to act, one after the other.

Logits exist for a few positions at a time, never for all at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from policies.openvla.network import OpenVLA, causal_mask
from policies.openvla.prompt import TokenRows
from rlinf_embodied.algorithms.log_probs import greedy_tokens, sample_tokens, token_log_probs_and_entropy

_POSITIONS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDistribution:
    """What tokens are drawn from, and therefore what their log-probs are those of.

    Attributes:
        temperature: divides the logits.
        columns: only these tokens can be drawn; all of the vocabulary if it is None.
        top_k: only the k likeliest tokens of the whole vocabulary can be drawn; 0 for all.
    """

    temperature: float = 1.0
    columns: slice | None = None
    top_k: int = 0

    def allowed(self, logits: Tensor) -> Tensor:
        """Returns logits [.., V] with -inf where no token can be drawn."""
        forbidden = torch.zeros_like(logits, dtype=torch.bool)
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
            forbidden |= logits < least
        if self.columns is not None:
            outside = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
            outside[self.columns] = False
            forbidden |= outside
        return logits.masked_fill(forbidden, -torch.inf)

    def logits(self, hidden: Tensor, output_layer: nn.Linear) -> tuple[Tensor, int]:
        """Returns logits [.., n] of a run of tokens that holds all that can be drawn, and the id of its first.

        Args:
            hidden: final hidden states [.., D].
            output_layer: makes logits of them.
        """
        if self.columns is None or self.top_k:
            return self.allowed(output_layer(hidden)), 0
        first, last, _ = self.columns.indices(output_layer.out_features)
        if type(output_layer) is nn.Linear:  # the other columns would only be forbidden
            return F.linear(hidden, output_layer.weight[first:last]), first
        return output_layer(hidden)[..., first:last], first  # it has adapters

    def choose(self, hidden: Tensor, output_layer: nn.Linear, uniforms: Tensor | None) -> Tensor:
        """Returns tokens [..] for hidden states [.., D]: drawn by uniforms [..] in [0, 1), or the likeliest ones."""
        logits, first = self.logits(hidden, output_layer)
        places = greedy_tokens(logits) if uniforms is None else sample_tokens(logits, uniforms, self.temperature)
        return places + first


def action_log_probs(
    hidden: Tensor,
    output_layer: nn.Linear,
    tokens: Tensor,
    distribution: TokenDistribution,
    positions_at_once: int = _POSITIONS_AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """Returns (log p(token), entropy in nats), float32, both of the shape of `tokens`.

    Where gradients are asked for, the logits of each piece are computed again in the backward pass.

    Args:
        hidden: final hidden states that predict the tokens, [.., D].
        output_layer: makes logits of them.
        tokens: ids [..]; one that cannot be drawn has log-prob -inf.
        distribution: what they were drawn from.
        positions_at_once: of how many positions logits are in memory at a time.
    """
    pieces = zip(hidden.flatten(0, -2).split(positions_at_once), tokens.flatten().split(positions_at_once), strict=True)
    done = [
        checkpoint(_piece, states, output_layer, ids, distribution, use_reentrant=False)
        if torch.is_grad_enabled()
        else _piece(states, output_layer, ids, distribution)
        for states, ids in pieces
    ]
    log_probs, entropies = zip(*done, strict=True)  # pyright: ignore[reportArgumentType]
    return torch.cat(log_probs).view(tokens.shape), torch.cat(entropies).view(tokens.shape)


def _piece(
    states: Tensor, output_layer: nn.Linear, ids: Tensor, distribution: TokenDistribution
) -> tuple[Tensor, Tensor]:
    logits, first = distribution.logits(states, output_layer)
    inside = (ids >= first) & (ids < first + logits.shape[-1])
    places = torch.where(inside, ids - first, 0)
    log_probs, entropy = token_log_probs_and_entropy(logits, places, distribution.temperature)
    return log_probs.masked_fill(~inside, -torch.inf), entropy


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
