from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf_embodied.algorithms import losses as L
from rlinf_embodied.errors import ObjectiveError


def make_rows(seed: int, rows: int = 12) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, 5, generator=draw) < 0.7
    mask[0, 0] = True
    fill = lambda: torch.where(mask, torch.randn(rows, 5, generator=draw), torch.nan)  # noqa: E731
    return {"log_probs": fill(), "old_log_probs": fill(), "advantages": fill(), "mask": mask, "weights": fill().exp()}


def test_the_clipped_objective_equals_a_loop_over_its_entries():
    rows = make_rows(0)
    result = L.policy_loss(**rows, clip_low=0.2, clip_high=0.28)
    loss = weight = kl = outside = largest = 0.0
    count = 0
    for i, j in rows["mask"].nonzero().tolist():
        log_ratio = float(rows["log_probs"][i, j] - rows["old_log_probs"][i, j])
        ratio, advantage, w = math.exp(log_ratio), float(rows["advantages"][i, j]), float(rows["weights"][i, j])
        loss -= w * min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        weight, count = weight + w, count + 1
        kl += ratio - 1 - log_ratio
        outside += ratio < 0.8 or ratio > 1.28
        largest = max(largest, abs(log_ratio))
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    assert result.weight.item() == pytest.approx(weight, rel=1e-5)
    assert result.approx_kl[0].item() == pytest.approx(kl, rel=1e-5)
    assert result.approx_kl[1].item() == result.clipfrac[1].item() == count
    assert result.clipfrac[0].item() == outside
    assert result.max_abs_log_ratio.item() == pytest.approx(largest)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    # d loss / d log pi is -ratio * A, or 0 where the clip has taken hold: above 1.28 for A > 0, below 0.8 for A < 0
    [(1.0, 2.0, -2.0), (1.25, 2.0, -2.5), (1.3, 2.0, 0.0), (1.3, -2.0, 2.6), (0.7, -2.0, 0.0), (0.7, 2.0, -1.4)],
)
def test_the_clip_stops_the_gradient_only_where_the_step_would_go_further(ratio, advantage, gradient):
    log_probs = torch.tensor([math.log(ratio)], requires_grad=True)
    ones = torch.ones(1, dtype=torch.bool)
    L.policy_loss(log_probs, torch.zeros(1), torch.tensor([advantage]), ones, 0.2, 0.28).loss.backward()
    assert log_probs.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    # behind c = 3 the loss of an action with A < 0 is -c A, a constant; all else is as without
    [
        (2.9, -2.0, 5.8, 5.8),
        (3.1, -2.0, 6.0, 0.0),
        (50.0, -2.0, 6.0, 0.0),
        (50.0, 2.0, -2.4, 0.0),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_a_dual_clip_bounds_the_loss_where_the_advantage_is_negative(ratio, advantage, loss, gradient):
    log_probs = torch.tensor([math.log(ratio)], requires_grad=True)
    rows = (log_probs, torch.zeros(1), torch.tensor([advantage]), torch.ones(1, dtype=torch.bool), 0.2, 0.2)
    found = L.policy_loss(*rows, dual_clip=3.0).loss
    found.backward()
    assert found.item() == pytest.approx(loss, rel=1e-5)
    assert log_probs.grad.item() == pytest.approx(gradient, rel=1e-5)
    if ratio > 3 and advantage < 0:
        assert L.policy_loss(*rows).loss.item() == pytest.approx(-ratio * advantage, rel=1e-5)


@pytest.mark.parametrize("difference", [200.0, -200.0, 20.5])
def test_a_log_ratio_beyond_the_limit_overflows_nothing_and_has_no_gradient(difference):
    log_probs = torch.tensor([difference, 0.1], requires_grad=True)
    zeros, mask = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    found = L.policy_loss(log_probs, zeros, torch.tensor([-1.0, -1.0]), mask, 0.2, 0.2, max_log_ratio=20.0)
    kl = L.reference_kl(log_probs, zeros, mask, max_log_ratio=20.0).sum()
    (found.loss + kl).backward()
    assert math.isfinite(found.loss.item() + kl.item() + found.approx_kl[0].item())
    assert log_probs.grad[0] == 0
    assert log_probs.grad[1].item() == pytest.approx(math.exp(0.1) + 1 - math.exp(-0.1), rel=1e-5)
    assert found.max_abs_log_ratio == abs(difference), "what is reported is what there is"


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
    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sum(p.weight for p in parts), whole.weight)
    for name in ("approx_kl", "clipfrac"):
        for k in range(2):
            torch.testing.assert_close(
                sum(getattr(p, name)[k] for p in parts), getattr(whole, name)[k], rtol=1e-4, atol=1e-4
            )
    assert max(p.max_abs_log_ratio for p in parts) == whole.max_abs_log_ratio


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([math.nan, math.inf, -math.inf, 1e38]))
def test_masked_entries_reach_neither_sums_nor_gradients(seed, garbage):
    draw = torch.Generator().manual_seed(seed)
    values, mask = torch.randn(6, 4, generator=draw), torch.rand(6, 4, generator=draw) < 0.5
    mask[0, 0] = True
    dirty = torch.where(mask, values, garbage).requires_grad_()
    assert torch.equal(L.masked_sum(dirty, mask), L.masked_sum(values, mask))
    zeros = torch.zeros_like(values)
    policy = L.policy_loss(dirty, zeros, dirty.detach(), mask, 0.2, 0.2, dirty.detach().abs())
    value = L.value_loss(dirty, dirty.detach() + 1, mask, dirty.detach(), clip=0.5)
    (policy.loss + value.loss).backward()
    assert torch.isfinite(policy.loss)
    assert torch.isfinite(value.loss)
    assert torch.isfinite(dirty.grad).all()
    assert not dirty.grad[~mask].any()


def test_a_loss_over_nothing_is_zero():
    nothing = torch.zeros(3, dtype=torch.bool)
    result = L.policy_loss(torch.ones(3), torch.zeros(3), torch.ones(3), nothing, 0.2, 0.2)
    assert (result.loss, result.weight, result.max_abs_log_ratio) == (0, 0, 0)


def test_coarse_advantages_are_repeated_over_finer_ratios():
    # tokens [B=2, C=2, A=3] with one advantage per action, then per chunk
    log_probs, old = torch.full((2, 2, 3), 0.1), torch.zeros(2, 2, 3)
    valid = torch.tensor([[True, True], [True, False]])
    per_action = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    result = L.policy_loss(log_probs, old, per_action, valid, 0.2, 0.2)
    assert result.loss.item() == pytest.approx(-math.exp(0.1) * 3 * (1 + 2 + 4), rel=1e-6)
    assert result.approx_kl[1].item() == 9
    result = L.policy_loss(log_probs, old, torch.tensor([1.0, 2.0]), valid, 0.2, 0.2)
    assert result.loss.item() == pytest.approx(-math.exp(0.1) * 3 * (1 + 1 + 2), rel=1e-6)


@pytest.mark.parametrize("shape", [(2, 3), (3,)])
def test_finer_or_foreign_advantages_are_refused(shape):
    two = torch.zeros(2)
    with pytest.raises(ObjectiveError, match=r"advantages has shape .* rewards may be coarser"):
        L.policy_loss(two, two, torch.zeros(shape), torch.ones(2, dtype=torch.bool), 0.2, 0.2)


def test_a_ratio_that_is_not_one_stops_the_run():
    L.require_unit_ratio(1e-6)
    for bad in (2e-5, math.nan):
        with pytest.raises(ObjectiveError, match="is not 1"):
            L.require_unit_ratio(bad)


def test_the_value_loss_is_half_the_squared_error_and_its_clip_is_pessimistic():
    values, returns = torch.tensor([1.0, 3.0, 9.0]), torch.tensor([0.0, 1.0, 0.0])
    mask = torch.tensor([True, True, False])
    plain = L.value_loss(values, returns, mask)
    assert (plain.loss.item(), plain.count.item()) == (2.5, 2)  # (1 + 4) / 2
    # V_old = 2 and clip 0.5: values become 1.5 and 2.5, errors 2.25 and 2.25; the larger of each pair: 2.25 and 4
    clipped = L.value_loss(values, returns, mask, torch.full((3,), 2.0), clip=0.5)
    assert clipped.loss.item() == 3.125


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
