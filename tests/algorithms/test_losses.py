"""Losses against loops over their entries, and their masks, limits and reductions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf_embodied.algorithms import losses as L
from rlinf_embodied.algorithms.iql import expectile_loss
from rlinf_embodied.algorithms.policy_losses import DPPO, GSPO, Divergence
from rlinf_embodied.config import RatioLevel
from rlinf_embodied.errors import ObjectiveError

MASK = torch.tensor([[True, True, False], [True, False, False]])
BEHAVIOUR = torch.tensor([[-1.0, -2.0, torch.nan], [-0.5, torch.nan, torch.nan]])
TRAINING = torch.tensor([[-1.0, -1.0, 7.0], [-2.5, 7.0, torch.nan]])  # differences 0, 1, -2


def make_rows(seed: int, rows: int = 12) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, 5, generator=draw) < 0.7
    mask[0, 0] = True
    fill = lambda: torch.where(mask, torch.randn(rows, 5, generator=draw), torch.nan)  # noqa: E731
    return {"log_probs": fill(), "old_log_probs": fill(), "advantages": fill(), "mask": mask, "weights": fill().exp()}


def test_the_clipped_objective_equals_a_loop_over_its_entries():
    rows = make_rows(0)
    result = L.policy_loss(**rows, clip_low=0.2, clip_high=0.28)
    loss = weight = kl = outside = 0.0
    count = 0
    for i, j in rows["mask"].nonzero().tolist():
        log_ratio = float(rows["log_probs"][i, j] - rows["old_log_probs"][i, j])
        ratio, advantage, w = math.exp(log_ratio), float(rows["advantages"][i, j]), float(rows["weights"][i, j])
        loss -= w * min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        weight, count = weight + w, count + 1
        kl += ratio - 1 - log_ratio
        outside += ratio < 0.8 or ratio > 1.28
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    assert result.weight.item() == pytest.approx(weight, rel=1e-5)
    assert result.approx_kl.item() == pytest.approx(kl, rel=1e-5)
    assert (result.clipped.item(), result.count.item()) == (outside, count)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    # d loss / d log pi is -ratio * A, or 0 where the clip has taken hold: above 1.28 for A > 0, below 0.8 for A < 0
    [(1.0, 2.0, -2.0), (1.25, 2.0, -2.5), (1.3, 2.0, 0.0), (1.3, -2.0, 2.6), (0.7, -2.0, 0.0), (0.7, 2.0, -1.4)],
)
def test_the_clip_stops_the_gradient_only_where_the_step_would_go_further(ratio, advantage, gradient):
    log_probs = torch.tensor([math.log(ratio)], requires_grad=True)
    ones = torch.ones(1)
    L.policy_loss(log_probs, torch.zeros(1), torch.tensor([advantage]), ones.bool(), 0.2, 0.28, ones).loss.backward()
    assert log_probs.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),  # with a dual clip at 3 the loss of A < 0 is at most 3 |A|
    [(5.0, -2.0, 6.0), (2.9, -2.0, 5.8), (0.5, -2.0, 1.6), (5.0, 2.0, -2.56)],
)
def test_a_dual_clip_bounds_the_loss_of_an_action_that_became_much_likelier(ratio, advantage, loss):
    ones, old = torch.ones(1), torch.zeros(1)
    rows = (torch.tensor([math.log(ratio)]), old, torch.tensor([advantage]), ones.bool(), 0.2, 0.28, ones)
    assert L.policy_loss(*rows, dual_clip=3.0).loss.item() == pytest.approx(loss)


@pytest.mark.parametrize(
    ("value", "old", "goal", "loss"),  # clip 0.5, Huber delta 2
    [(1.0, 1.0, 2.0, 0.5), (1.0, 0.0, 2.0, 1.125), (0.0, 0.0, 5.0, 8.0), (3.0, 0.0, 3.0, 3.0), (3.0, 0.0, 0.0, 4.0)],
)
def test_values_count_as_moved_so_far_at_most_and_large_errors_linearly(value, old, goal, loss):
    values = torch.tensor([value, torch.nan], requires_grad=True)
    mask = torch.tensor([True, False])
    found = L.value_loss(values, torch.tensor([goal, 0.0]), mask, torch.tensor([old, 0.0]), clip=0.5, huber_delta=2.0)
    assert found.item() == pytest.approx(loss)
    assert torch.autograd.grad(found, values)[0].isfinite().all()


@pytest.mark.parametrize("difference", [200.0, -200.0, 20.5])
def test_a_log_ratio_beyond_the_limit_overflows_nothing_and_has_no_gradient(difference):
    log_probs = torch.tensor([difference, 0.1], requires_grad=True)
    zeros, mask = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    found = L.policy_loss(log_probs, zeros, torch.tensor([-1.0, -1.0]), mask, 0.2, 0.2, mask.float())
    kl = L.reference_kl(log_probs, zeros, mask).sum()
    (found.loss + kl).backward()
    assert math.isfinite(found.loss.item() + kl.item() + found.approx_kl.item())
    assert log_probs.grad[0] == 0
    assert log_probs.grad[1].item() == pytest.approx(math.exp(0.1) + 1 - math.exp(-0.1), rel=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_microbatches_add_up_to_the_whole_batch(seed, sizes):
    rows = make_rows(seed, sum(sizes))
    whole = L.policy_loss(**rows, clip_low=0.2, clip_high=0.2)
    split = {name: value.split(sizes) for name, value in rows.items()}
    parts = [
        L.policy_loss(**{name: value[i] for name, value in split.items()}, clip_low=0.2, clip_high=0.2)
        for i in range(len(sizes))
    ]
    for name in ("loss", "weight", "approx_kl", "clipped", "count"):
        found = sum(getattr(p, name) for p in parts)
        torch.testing.assert_close(found, getattr(whole, name), rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([math.nan, math.inf, -math.inf, 1e38]))
def test_masked_entries_reach_neither_sums_nor_gradients(seed, garbage):
    draw = torch.Generator().manual_seed(seed)
    values, mask = torch.randn(6, 4, generator=draw), torch.rand(6, 4, generator=draw) < 0.5
    mask[0, 0] = True
    dirty = torch.where(mask, values, garbage).requires_grad_()
    zeros = torch.zeros_like(values)
    policy = L.policy_loss(dirty, zeros, dirty.detach(), mask, 0.2, 0.2, dirty.detach().abs())
    value = L.value_loss(dirty, dirty.detach() + 1, mask)
    (policy.loss + value).backward()
    assert torch.isfinite(policy.loss)
    assert torch.isfinite(value)
    assert torch.isfinite(dirty.grad).all()
    assert not dirty.grad[~mask].any()


def test_a_loss_over_nothing_is_zero():
    nothing = torch.zeros(3, dtype=torch.bool)
    result = L.policy_loss(torch.ones(3), torch.zeros(3), torch.ones(3), nothing, 0.2, 0.2, torch.ones(3))
    assert (result.loss, result.weight, result.count) == (0, 0, 0)


def test_coarse_advantages_are_repeated_over_finer_ratios():
    # tokens [B=2, C=2, A=3] with one advantage per action, then per chunk
    log_probs, old = torch.full((2, 2, 3), 0.1), torch.zeros(2, 2, 3)
    valid = torch.tensor([[True, True], [True, False]])
    per_action = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    ones = torch.ones(2)
    result = L.policy_loss(log_probs, old, per_action, valid, 0.2, 0.2, ones)
    assert result.loss.item() == pytest.approx(-math.exp(0.1) * 3 * (1 + 2 + 4), rel=1e-6)
    assert result.count.item() == 9
    result = L.policy_loss(log_probs, old, torch.tensor([1.0, 2.0]), valid, 0.2, 0.2, ones)
    assert result.loss.item() == pytest.approx(-math.exp(0.1) * 3 * (1 + 1 + 2), rel=1e-6)


def test_a_ratio_that_is_not_one_stops_the_run():
    L.require_unit_ratio(1e-6)
    for bad in (2e-5, math.nan):
        with pytest.raises(ObjectiveError, match="is not 1"):
            L.require_unit_ratio(bad)


def test_the_value_loss_is_half_the_squared_error():
    values, returns = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([0.0, 1.0, 0.0])
    mask = torch.tensor([True, True, False])
    assert L.value_loss(values, returns, mask).item() == 2.5  # (1 + 4) / 2


def total(blocks: dict[int, Tensor]) -> Tensor:
    return torch.stack([*blocks.values()]).sum(0)


def test_explained_variance_from_block_sums_is_that_of_the_whole():
    draw = torch.Generator().manual_seed(0)
    returns = torch.randn(8, 6, generator=draw) + 2
    values = returns + 0.5 * torch.randn(8, 6, generator=draw)
    mask = torch.rand(8, 6, generator=draw) < 0.6
    columns = [torch.where(mask, column, torch.nan) for column in (values, returns)]
    blocks = {k: tuple(c[rows] for c in (*columns, mask)) for k, rows in enumerate((slice(3), slice(3, 8)))}
    expected = 1 - (returns - values)[mask].var(correction=0) / returns[mask].var(correction=0)
    assert L.explained_variance(blocks, total) == pytest.approx(expected.item(), abs=1e-5)


def test_explained_variance_has_no_value_where_returns_do_not_vary():
    constant, mask = torch.full((4,), 0.3), torch.ones(4, dtype=torch.bool)
    for rows in (slice(4), slice(0)):
        assert math.isnan(L.explained_variance({0: (torch.zeros(4)[rows], constant[rows], mask[rows])}, total))


# --------------------------------------------------------------------------------------------- sampler and training
def test_a_mismatch_sums_the_differences_of_counted_tokens():
    distance, largest, kl, ratio = L.mismatch(TRAINING, BEHAVIOUR, MASK).tolist()
    assert (distance, largest) == (3.0, 2.0)
    assert kl == pytest.approx((math.e - 2) + (math.exp(-2) + 1))  # k3: e^0 - 1 - 0, e^1 - 1 - 1, e^-2 - 1 + 2
    assert ratio == pytest.approx(1 + math.e + math.exp(-2))
    assert L.mismatch(TRAINING, BEHAVIOUR, torch.zeros_like(MASK)).tolist() == [0.0] * 4


def test_the_estimate_is_the_kl_in_expectation_and_keeps_small_differences():
    g = torch.Generator().manual_seed(0)
    rollout, training = (torch.randn(12, generator=g).log_softmax(-1) for _ in range(2))
    exact = float((rollout.exp() * (rollout - training)).sum())
    tokens = torch.repeat_interleave(torch.arange(12), (rollout.exp() * 200_000).round().long())  # as often as drawn
    _, _, kl, ratio = L.mismatch(training[tokens], rollout[tokens], torch.ones(len(tokens), dtype=torch.bool)).tolist()
    assert kl / len(tokens) == pytest.approx(exact, rel=1e-3)
    assert ratio / len(tokens) == pytest.approx(1.0, abs=1e-3)
    near = L.mismatch(torch.tensor([-1.0 + 2.0**-20]), torch.tensor([-1.0]), torch.tensor([True]))
    assert near[2].item() == pytest.approx(2.0**-41, rel=1e-3)  # d^2 / 2


def test_importance_weights_are_capped_ratios_without_a_gradient():
    training = TRAINING.clone().requires_grad_()
    weights, outside = L.importance_weights(training, BEHAVIOUR, MASK, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[1.0, 2.0, 1.0], [math.exp(-2), 1.0, 1.0]]))
    assert not weights.requires_grad
    assert outside[MASK].tolist() == [False, True, False]


@pytest.mark.parametrize("masks", [False, True], ids=["truncate", "mask"])
@pytest.mark.parametrize(
    ("level", "floor", "cap"),
    [("token", 0.0, 1.2), ("token", 0.8, 1.2), ("sequence", 0.0, 1.2), ("sequence", 0.7, 1.5), ("geometric", 0.9, 1.1)],
)
def test_importance_weights_of_each_level_are_truncated_or_masked(level, floor, cap, masks):
    """Row by row in NumPy: rho per token, prod rho (Liu et al. 2025), (prod rho)^(1/n); IcePop's range [floor, cap]."""
    draw = torch.Generator().manual_seed(0)
    rollout, mask = -torch.rand(40, 6, generator=draw), torch.rand(40, 6, generator=draw) < 0.7
    training = rollout + 0.25 * torch.randn(40, 6, generator=draw)
    settings = {"floor": floor, "level": RatioLevel(level), "masks": masks}
    garbage = torch.where(mask, training, torch.nan)
    weights, outside = L.importance_weights(garbage, rollout, mask, cap, **settings)
    changed = 0
    for row in range(40):
        kept = mask[row].numpy()
        rho = np.exp((training[row] - rollout[row]).double().numpy()[kept])
        if level != "token":
            rho = np.full(len(rho), rho.prod() ** (1.0 if level == "sequence" else 1 / max(1, len(rho))))
        inside = (rho >= floor) & (rho <= cap)
        expected = np.where(inside, rho, 0.0) if masks else np.clip(rho, floor, cap)
        np.testing.assert_allclose(weights[row].numpy()[kept], expected, rtol=1e-5)
        assert (outside[row].numpy()[kept] == ~inside).all()
        changed += int((~inside).sum())
    assert 0.1 < changed / int(mask.sum()) < 0.9


def test_the_ratio_of_a_long_completion_is_a_mean_before_it_is_bounded():
    # 500 tokens, each 1.05 times as likely: the sum of log ratios, 24.4, is beyond MAX_LOG_RATIO
    now, ones = torch.tensor([500 * math.log(1.05)], requires_grad=True), torch.ones(1)
    rows = (now, torch.zeros(1), torch.tensor([-1.0]), ones.bool(), 0.1, 0.1, ones)
    found = L.policy_loss(*rows, loss=GSPO(), length=500 * ones)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(1.05)
    assert now.grad is not None
    assert now.grad.item() == pytest.approx(1.05 / 500)


@pytest.mark.parametrize(("divergence", "threshold"), [("tv", 0.15), ("kl", 0.05)])
def test_dppo_masks_what_would_leave_a_trust_region_of_probabilities(divergence, threshold):
    """arXiv 2602.04879: of sampled tokens with p = pi(a), q = pi_old(a), a gradient r A grad log pi, or none."""
    draw = torch.Generator().manual_seed(0)
    old, now = (torch.rand(400, generator=draw).clamp(1e-3, 1 - 1e-3).log() for _ in range(2))
    now[:100] = old[:100] + 0.1 * torch.randn(100, generator=draw)
    now, advantages = now.clamp(max=-1e-6).requires_grad_(), torch.randn(400, generator=draw)
    ones = torch.ones(400)
    loss = DPPO(divergence=Divergence(divergence), threshold=threshold)
    L.policy_loss(now, old, advantages, ones.bool(), 0.2, 0.2, ones, loss=loss).loss.backward()
    masked = 0
    for i in range(400):
        p, q, a = (float(x[i].double()) for x in (now.detach().double().exp(), old.double().exp(), advantages))
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        leaves = (abs(p - q) if divergence == "tv" else kl) > threshold and ((a > 0 and p > q) or (a < 0 and p < q))
        masked += leaves
        assert now.grad[i].item() == pytest.approx(0.0 if leaves else -min(p / q, 20.0) * a, rel=1e-4)
    assert 40 < masked < 360


def test_dppo_refuses_densities():
    ones = torch.ones(1)
    with pytest.raises(ObjectiveError, match=r"algorithm\.loss is DPPO.* 0\.5: a density; use algorithm\.loss=clipped"):
        L.policy_loss(0.5 * ones, ones, ones, ones.bool(), 0.2, 0.2, ones, loss=DPPO())


@pytest.mark.parametrize("expectile", [0.1, 0.5, 0.9])
def test_the_expectile_loss_is_least_at_the_expectile(expectile) -> None:
    value = torch.tensor(expectile, requires_grad=True)  # the expectile of 0 and 1
    (slope,) = torch.autograd.grad(expectile_loss(torch.tensor([0.0, 1.0]) - value, expectile), [value])
    assert float(slope) == pytest.approx(0.0, abs=1e-6)
