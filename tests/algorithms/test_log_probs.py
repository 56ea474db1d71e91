from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlinf_embodied.algorithms import log_probs as P
from rlinf_embodied.config import Level
from rlinf_embodied.errors import ObjectiveError


def test_log_probs_and_entropy_are_those_of_a_categorical_at_the_temperature():
    draw = torch.Generator().manual_seed(0)
    logits, tokens = torch.randn(4, 3, 7, generator=draw), torch.randint(7, (4, 3), generator=draw)
    reference = Categorical(logits=logits / 0.6)
    torch.testing.assert_close(P.token_log_probs(logits, tokens, 0.6), reference.log_prob(tokens))
    log_probs, entropy = P.token_log_probs_and_entropy(logits, tokens, 0.6)
    torch.testing.assert_close(entropy, reference.entropy())
    assert torch.equal(log_probs, P.token_log_probs(logits, tokens, 0.6))


def test_an_entropy_that_is_only_looked_at_has_the_same_bits_and_no_graph():
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 7, generator=draw, requires_grad=True)
    tokens = torch.randint(7, (5,), generator=draw)
    (log_probs, entropy), (seen_log_probs, seen) = (
        P.token_log_probs_and_entropy(logits, tokens, 0.6, entropy_gradient) for entropy_gradient in (True, False)
    )
    assert torch.equal(log_probs, seen_log_probs)
    assert torch.equal(entropy, seen)
    assert (entropy.requires_grad, seen.requires_grad, seen_log_probs.requires_grad) == (True, False, True)


def test_a_forbidden_value_adds_no_entropy_and_no_nan_gradient():
    logits = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    log_prob, entropy = P.token_log_probs_and_entropy(logits, torch.tensor(0), 1.0)
    assert entropy.item() == pytest.approx(math.log(2))
    (entropy + log_prob).backward()
    assert torch.isfinite(logits.grad).all()


def test_sampling_inverts_the_cumulative_distribution():
    logits = torch.tensor([0.2, 0.3, 0.5]).log().expand(6, 3)
    uniforms = torch.tensor([0.0, 0.19, 0.21, 0.49, 0.51, 0.99])
    assert P.sample_tokens(logits, uniforms, 1.0).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("num_values", [2, 33, 4096, 32000])
def test_uniforms_near_one_neither_run_over_the_end_nor_pick_impossible_values(num_values):
    logits = torch.zeros(3, num_values)
    logits[:, num_values // 2 :] = -math.inf
    logits[:, 0] = -math.inf if num_values > 2 else 0.0
    uniforms = torch.tensor([0.0, 1 - 2.0**-24, 1.0])
    tokens = P.sample_tokens(logits, uniforms, 1.0)
    assert torch.isfinite(P.token_log_probs(logits, tokens, 1.0)).all()
    assert tokens.tolist() == [1 if num_values > 2 else 0, *[num_values // 2 - 1] * 2]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.floats(0.05, 2.0), st.floats(0, 1, width=32))
def test_a_sampled_token_is_possible_and_brackets_its_uniform(seed, temperature, uniform):
    draw = torch.Generator().manual_seed(seed)
    logits = 30 * torch.randn(5, 33, generator=draw)
    logits[torch.rand(logits.shape, generator=draw) < 0.3] = -math.inf
    logits[:, 7] = 0.0
    tokens = P.sample_tokens(logits, torch.full((5,), uniform), temperature)
    probs = P.log_softmax(logits, temperature).exp().double()
    assert (probs.gather(1, tokens[:, None]) > 0).all()
    cumulated = probs.cumsum(1) / probs.sum(1, keepdim=True)
    above = cumulated.gather(1, tokens[:, None])[:, 0]
    below = above - probs.gather(1, tokens[:, None])[:, 0]
    assert (below <= uniform + 1e-6).all()
    assert (above >= uniform - 1e-6).all()


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (9, 0.8, 0.1), (1, 0.01, 1.0)]
)
def test_what_may_be_sampled_is_what_transformers_leaves(top_k, top_p, min_p):
    scores = P.log_softmax(3 * torch.randn(50, 33, generator=torch.Generator().manual_seed(0)), 1.0)
    found, expected = P.truncated(scores, top_k, top_p, min_p), scores
    for warper in (TopKLogitsWarper(top_k or 33), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)):
        expected = warper(None, expected)
    assert torch.equal(found, expected)
    assert (found > -math.inf).any(-1).all()
    assert P.truncated(scores, 0, 1.0, 0.0) is scores


@pytest.mark.parametrize("chunk", [2, 100])
def test_log_probs_and_entropy_over_recorded_sets_are_those_of_the_restricted_distribution(chunk):
    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(5, 7, generator=draw)).requires_grad_()
    sets, tokens = [[0, 2, 6], [], [4], [1, 2, 3, 5], []], torch.tensor([2, 3, 4, 5, 0])
    support = torch.tensor([*map(len, sets)], dtype=torch.int32), torch.tensor([*chain(*sets)], dtype=torch.int32)
    found = P.chunked_log_probs_and_entropy(lambda hidden: hidden, logits, tokens, 0.6, chunk, support=support)
    kept = [logits[n, of_token or range(7)] for n, of_token in enumerate(sets)]
    references = [torch.distributions.Categorical(logits=values / 0.6) for values in kept]
    places = [(of_token or [*range(7)]).index(token) for of_token, token in zip(sets, tokens.tolist(), strict=True)]
    expected = (
        torch.stack([one.log_prob(torch.tensor(place)) for one, place in zip(references, places, strict=True)]),
        torch.stack([one.entropy() for one in references]),
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert one is not None
        gradients = [torch.autograd.grad(values.sin().sum(), logits, retain_graph=True)[0] for values in (one, other)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad):
    logits = torch.zeros(2, 3)
    logits[1, 0] = bad
    with pytest.raises(ObjectiveError, match="1 of 2 tokens"):
        P.sample_tokens(logits, torch.full((2,), 0.5), 1.0)


def test_levels_sum_what_is_valid():
    log_probs = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [math.nan, 8.0]]])  # B=2, C=2, A=2
    valid = torch.tensor([[True, True], [True, False]])
    assert P.to_level(log_probs, valid, Level.token).tolist() == [[[1, 2], [3, 4]], [[5, 6], [0, 0]]]
    assert P.to_level(log_probs, valid, Level.action).tolist() == [[3, 7], [11, 0]]
    assert P.to_level(log_probs, valid, Level.chunk).tolist() == [10, 11]


@pytest.mark.parametrize("level", list(Level))
def test_weights_have_the_shape_of_their_level_and_keep_their_sum(level):
    valid = torch.tensor([[True, True], [True, False], [False, False]])
    weights = valid * torch.tensor([[0.5], [2.0], [1.0]])
    at_level = P.to_level(torch.zeros(3, 2, 4), valid, level)
    moved = P.weights_at_level(weights, level, 4)
    assert moved.shape == at_level.shape
    assert moved.sum() == weights.sum()
    assert torch.equal((moved > 0).reshape(3, -1).any(1), valid.any(1))


@given(st.integers(0, 2**31), st.integers(0, 4))
def test_the_mean_near_the_mode_is_that_of_its_definition(seed: int, reach: int) -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(seed))
    for row, mean in zip(logits, P.mean_near_mode(logits, reach).tolist(), strict=True):
        mode = max(range(9), key=lambda k: float(row[k]))
        near = [k for k in range(9) if abs(k - mode) <= reach]
        odds = [math.exp(float(row[k])) for k in near]
        assert mean == pytest.approx(sum(k * p for k, p in zip(near, odds, strict=True)) / sum(odds), abs=1e-5)
