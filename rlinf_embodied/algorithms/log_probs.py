"""Log-probabilities of discrete action tokens: exact values, sampling with given noise, and sums up to a credit level.

Axes: V values of a token, C actions per chunk, A tokens per action; `*batch` and `*axes` are any.
"""
# ruff: noqa: F722, UP037 - jaxtyping's axes are strings, not forward references

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlinf_embodied.config import Level
from rlinf_embodied.errors import ObjectiveError


def log_softmax(logits: Float[Tensor, "*axes V"], temperature: float) -> Float[Tensor, "*axes V"]:
    """Returns log-probabilities of all values at a temperature, float32."""
    return torch.log_softmax(logits.to(torch.float32) / temperature, dim=-1)


def token_log_probs(
    logits: Float[Tensor, "*axes V"], tokens: Int[Tensor, "*axes"], temperature: float
) -> Float[Tensor, "*axes"]:
    """Returns log p(token) under the sampling distribution, including its temperature."""
    return log_softmax(logits, temperature).gather(-1, tokens[..., None])[..., 0]


def token_log_probs_and_entropy(
    logits: Float[Tensor, "*axes V"],
    tokens: Int[Tensor, "*axes"],
    temperature: float,
    entropy_gradient: bool = True,
) -> tuple[Float[Tensor, "*axes"], Float[Tensor, "*axes"]]:
    """Returns (log p(token), entropy -sum_v p_v log p_v in nats), sharing one softmax.

    Values with a logit of -inf do not contribute to the entropy.  Without `entropy_gradient` the backward pass
    needs less memory, by several arrays of V values per token.
    """
    log_probs = log_softmax(logits, temperature)
    for_entropy = log_probs if entropy_gradient else log_probs.detach()
    # 0 * -inf would be NaN; clamped, a masked value adds 0 and has no gradient
    entropy = -(for_entropy.exp() * for_entropy.clamp(min=torch.finfo(for_entropy.dtype).min)).sum(-1)
    return log_probs.gather(-1, tokens[..., None])[..., 0], entropy


def restricted(logits: Float[Tensor, "N V"], sizes: Int[Tensor, " N"], ids: Int[Tensor, " M"]) -> Float[Tensor, "N V"]:
    """Returns logits with -inf outside of each token's set of values.

    `sizes` are those of the sets, whose ids follow each other; a size of 0 restricts nothing.
    """
    outside = (sizes > 0)[:, None].repeat(1, logits.shape[1])
    outside[torch.arange(len(sizes), device=ids.device).repeat_interleave(sizes), ids.long()] = False
    return logits.masked_fill(outside, -torch.inf)


def chunked_log_probs_and_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "N H"],
    tokens: Int[Tensor, " N"],
    temperature: float,
    chunk: int,
    with_entropy: bool = True,
    entropy_gradient: bool = True,
    support: tuple[Int[Tensor, " N"], Int[Tensor, " M"]] | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """Returns `token_log_probs` and optionally the entropy for the logits of `head` on hidden states.

    Both are of the distribution restricted to `support` (sizes and ids, see `restricted`).  At most `chunk` rows of
    logits are in memory at a time; the backward pass recomputes them.
    """

    def part(states: Tensor, targets: Tensor, *sets: Tensor) -> Tensor:
        logits = restricted(head(states), *sets) if sets else head(states)
        if with_entropy:
            return torch.stack(token_log_probs_and_entropy(logits, targets, temperature, entropy_gradient))
        return token_log_probs(logits, targets, temperature)[None]

    recomputed = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
    parts = [hidden.split(chunk), tokens.split(chunk)]
    if support is not None:
        sizes = support[0].split(chunk)
        parts += [sizes, support[1].split([int(part.sum()) for part in sizes])]
    columns = torch.cat([recomputed(*arguments) for arguments in zip(*parts, strict=True)], dim=1)
    return columns[0], columns[1] if with_entropy else None


def sample_tokens(
    logits: Float[Tensor, "*axes V"], uniforms: Float[Tensor, "*axes"], temperature: float
) -> Int[Tensor, "*axes"]:
    """Samples by the inverse cumulative distribution: the first value whose cumulative probability exceeds `uniforms`.

    The sum is in float64 and scaled by its total, so that rounding can neither exceed the end nor select a value of
    probability 0.  Logits of -inf exclude a value; uniforms lie in [0, 1].

    Raises:
        ObjectiveError: logits are NaN or +inf, or exclude every value.
    """
    return inverse_cdf(log_softmax(logits, temperature), uniforms)


def inverse_cdf(log_probs: Float[Tensor, "*axes V"], uniforms: Float[Tensor, "*axes"]) -> Int[Tensor, "*axes"]:
    """Samples as `sample_tokens`, from the log-probs of all values.

    Probabilities need not sum to 1: those of a restricted distribution are scaled by their total.
    """
    cumulated = log_probs.exp().to(torch.float64).cumsum(-1)
    total = cumulated[..., -1]
    if bad := int((~torch.isfinite(total)).sum()):
        raise ObjectiveError(
            f"{bad} of {total.numel()} tokens to sample have logits that are NaN or infinite: the policy has diverged; "
            "go back to a checkpoint and use a smaller learning rate"
        )
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms.to(torch.float64) * total, below)
    return torch.searchsorted(cumulated, target[..., None], right=True)[..., 0]


def truncated(log_probs: Float[Tensor, "*axes V"], top_k: int, top_p: float, min_p: float) -> Float[Tensor, "*axes V"]:
    """Returns log-probs with -inf for tokens that the restrictions exclude; the others do not change.

    The restrictions apply in transformers' order: the `top_k` most likely tokens (0: all), and ties of the last one; of
    the rest, the smallest set of most likely tokens with the share `top_p`; tokens with at least `min_p` times the
    probability of the most likely one, which is always kept.
    """
    if 0 < top_k < log_probs.shape[-1]:
        log_probs = log_probs.masked_fill(log_probs < log_probs.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:
        ordered, order = log_probs.sort(descending=True, stable=True)
        cumulated = ordered.exp().to(torch.float64).cumsum(-1)
        left_out = cumulated - ordered.exp() >= top_p * cumulated[..., -1:]
        left_out[..., 0] = False
        log_probs = log_probs.masked_fill(left_out.scatter(-1, order, left_out), -torch.inf)
    if min_p > 0:
        lowest = log_probs.amax(-1, keepdim=True) + math.log(min_p)
        log_probs = log_probs.masked_fill(log_probs < lowest, -torch.inf)
    return log_probs


def mean_near_mode(logits: Float[Tensor, "*axes V"], reach: int) -> Float[Tensor, "*axes"]:
    """Returns the mean index over the values within `reach` of the mode (the first one of ties), float32.

    For tokens whose values are ordered: this has a finer resolution than the mode, and does not average over distant
    modes.
    """
    probabilities, mode = log_softmax(logits, 1.0).exp(), logits.argmax(-1)
    total = shift = torch.zeros_like(mode, dtype=torch.float32)
    for offset in range(-reach, reach + 1):
        index = mode + offset
        in_range = (index >= 0) & (index < logits.shape[-1])
        probability = probabilities.gather(-1, index.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
        weight = torch.where(in_range, probability, 0.0)
        total, shift = total + weight, shift + weight * offset
    return mode + shift / total


def to_level(
    log_probs: Float[Tensor, "*batch C A"], valid: Bool[Tensor, "*batch C"], level: Level
) -> Float[Tensor, "..."]:
    """Returns log-probs summed up to a level: [*batch, C, A], [*batch, C] or [*batch].

    Invalid actions add 0, and their entries are 0.
    """
    masked = torch.where(valid[..., None], log_probs, 0.0)
    if level is Level.token:
        return masked
    return masked.sum(-1) if level is Level.action else masked.sum((-2, -1))


def weights_at_level(weights: Float[Tensor, "*batch C"], level: Level, tokens_per_action: int) -> Float[Tensor, "..."]:
    """Converts weights of actions to the entries of `to_level`; their sum does not change.

    Entries with weight 0 do not count; a chunk counts if any of its actions does.
    """
    if level is Level.token:
        return (weights / tokens_per_action)[..., None].expand(*weights.shape, tokens_per_action)
    return weights if level is Level.action else weights.sum(-1)
