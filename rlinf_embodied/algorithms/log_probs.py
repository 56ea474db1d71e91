"""Log-probabilities of discrete action tokens: exact ones, sampling by given noise, and sums up to a credit level.

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
    """Returns log p(token) under the distribution that was sampled from, temperature included."""
    return log_softmax(logits, temperature).gather(-1, tokens[..., None])[..., 0]


def token_log_probs_and_entropy(
    logits: Float[Tensor, "*axes V"],
    tokens: Int[Tensor, "*axes"],
    temperature: float,
    entropy_gradient: bool = True,
) -> tuple[Float[Tensor, "*axes"], Float[Tensor, "*axes"]]:
    """Returns (log p(token), entropy -sum_v p_v log p_v in nats), sharing one softmax.

    A value with a logit of -inf adds nothing to the entropy.  Without `entropy_gradient`, where it is only looked at, V
    values per token less are kept for the backward pass, several times over.
    """
    every = log_softmax(logits, temperature)
    kept = every if entropy_gradient else every.detach()
    # 0 * -inf is NaN; clamped, a forbidden value adds 0 and passes no gradient
    entropy = -(kept.exp() * kept.clamp(min=torch.finfo(kept.dtype).min)).sum(-1)
    return every.gather(-1, tokens[..., None])[..., 0], entropy


def chunked_log_probs_and_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "N H"],
    tokens: Int[Tensor, " N"],
    temperature: float,
    chunk: int,
    with_entropy: bool = True,
    entropy_gradient: bool = True,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"] | None]:
    """Returns `token_log_probs` and, where asked for, the entropy of the logits that `head` makes of hidden states.

    No more than `chunk` rows of logits are in memory at a time; the backward pass computes them again.
    """

    def part(states: Tensor, targets: Tensor) -> Tensor:
        logits = head(states)
        if with_entropy:
            return torch.stack(token_log_probs_and_entropy(logits, targets, temperature, entropy_gradient))
        return token_log_probs(logits, targets, temperature)[None]

    again = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
    found = torch.cat([again(*both) for both in zip(hidden.split(chunk), tokens.split(chunk), strict=True)], dim=1)
    return found[0], found[1] if with_entropy else None


def sample_tokens(
    logits: Float[Tensor, "*axes V"], uniforms: Float[Tensor, "*axes"], temperature: float
) -> Int[Tensor, "*axes"]:
    """Samples by inverting the cumulative distribution: the first value whose cumulated probability exceeds `uniforms`.

    The sum runs in float64 and is scaled by its own total, so that rounding can neither run over the end nor pick a
    value of probability 0.  Logits of -inf forbid a value; uniforms lie in [0, 1].

    Raises:
        ObjectiveError: logits that are NaN or +inf, or forbid every value.
    """
    return inverse_cdf(log_softmax(logits, temperature), uniforms)


def inverse_cdf(log_probs: Float[Tensor, "*axes V"], uniforms: Float[Tensor, "*axes"]) -> Int[Tensor, "*axes"]:
    """Does the work of `sample_tokens` for a caller that has the log-probs of all values already.

    They need not sum to 1: what is left after a restriction is scaled by its own total.
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
    """Returns log-probs with -inf in place of tokens that are not to be sampled; the others stay as they are.

    The restrictions apply in transformers' order: the `top_k` likeliest tokens (0: all) and equals of the last one; of
    what is left, the fewest likeliest ones that hold the share `top_p`; those that have at least `min_p` times the
    probability of the likeliest one, which always stays.
    """
    if 0 < top_k < log_probs.shape[-1]:
        log_probs = log_probs.masked_fill(log_probs < log_probs.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:
        ordered, places = log_probs.sort(descending=True, stable=True)
        cumulated = ordered.exp().to(torch.float64).cumsum(-1)
        left_out = cumulated - ordered.exp() >= top_p * cumulated[..., -1:]
        left_out[..., 0] = False
        log_probs = log_probs.masked_fill(left_out.scatter(-1, places, left_out), -torch.inf)
    if min_p > 0:
        least = log_probs.amax(-1, keepdim=True) + math.log(min_p)
        log_probs = log_probs.masked_fill(log_probs < least, -torch.inf)
    return log_probs


def mean_near_mode(logits: Float[Tensor, "*axes V"], reach: int) -> Float[Tensor, "*axes"]:
    """Returns the mean index over the values within `reach` of the likeliest one, float32; the first of equals is that.

    For tokens whose values are places on a line: finer than the likeliest value alone, and never between two modes that
    are further apart.
    """
    probabilities, mode = log_softmax(logits, 1.0).exp(), logits.argmax(-1)
    total = shift = torch.zeros_like(mode, dtype=torch.float32)
    for offset in range(-reach, reach + 1):
        place = mode + offset
        inside = (place >= 0) & (place < logits.shape[-1])
        found = probabilities.gather(-1, place.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
        weight = torch.where(inside, found, 0.0)
        total, shift = total + weight, shift + weight * offset
    return mode + shift / total


def to_level(
    log_probs: Float[Tensor, "*batch C A"], valid: Bool[Tensor, "*batch C"], level: Level
) -> Float[Tensor, "..."]:
    """Returns log-probs summed up to a level: [*batch, C, A], [*batch, C] or [*batch].

    Actions that are not valid add nothing, and their entries are 0.
    """
    kept = torch.where(valid[..., None], log_probs, 0.0)
    if level is Level.token:
        return kept
    return kept.sum(-1) if level is Level.action else kept.sum((-2, -1))


def weights_at_level(weights: Float[Tensor, "*batch C"], level: Level, tokens_per_action: int) -> Float[Tensor, "..."]:
    """Returns weights of actions for the entries of `to_level`; their sum stays what it was.

    Those that are 0 do not count; a chunk does if any of its actions does.
    """
    if level is Level.token:
        return (weights / tokens_per_action)[..., None].expand(*weights.shape, tokens_per_action)
    return weights if level is Level.action else weights.sum(-1)
