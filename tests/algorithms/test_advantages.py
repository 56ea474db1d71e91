from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import RolloutBuffer
from torch import Tensor

from rlinf_embodied.algorithms import advantages as A
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.reduce import Reducer


def make_rollout(seed: int, steps: int, rows: int, end: float = 0.15, skip: float = 0.2) -> dict[str, Tensor]:
    """Returns random columns; entries of invalid steps are garbage on purpose."""
    draw = torch.Generator().manual_seed(seed)
    uniform = lambda: torch.rand(steps, rows, generator=draw)  # noqa: E731
    valid = uniform() >= skip
    terminated = (uniform() < end) & valid
    truncated = (uniform() < end) & valid & ~terminated
    normal = lambda: torch.where(valid, torch.randn(steps, rows, generator=draw), torch.nan)  # noqa: E731
    return {
        "rewards": normal(),
        "values": normal(),
        "final_values": torch.randn(steps, rows, generator=draw),
        "last_values": torch.randn(rows, generator=draw),
        "terminated": terminated,
        "truncated": truncated,
        "valid": valid,
    }


def run_gae(rollout: dict[str, Tensor], gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    columns = {name: rollout[name] for name in ("values", "final_values", "last_values", "truncated", "valid")}
    following = A.next_values(**columns)
    names = ("rewards", "values", "terminated", "truncated", "valid")
    return A.gae(next_values=following, gamma=gamma, lam=lam, **{name: rollout[name] for name in names})


def sb3_advantages(rollout: dict[str, Tensor], rewards: Tensor, ends: Tensor, gamma: float, lam: float) -> np.ndarray:
    steps, rows = rewards.shape
    box = Box(-1, 1, (1,))
    buffer = RolloutBuffer(steps, box, box, device="cpu", gae_lambda=lam, gamma=gamma, n_envs=rows)
    buffer.rewards[:], buffer.values[:] = rewards.numpy(), rollout["values"].numpy()
    buffer.episode_starts[1:] = ends[:-1].numpy()
    buffer.compute_returns_and_advantage(rollout["last_values"], ends[-1].numpy())
    return buffer.advantages


@pytest.mark.parametrize("end", [0.0, 0.2])
def test_gae_equals_stable_baselines3_where_every_end_is_terminal(end):
    rollout = make_rollout(3, steps=40, rows=5, end=end, skip=0.0)
    rollout["terminated"] |= rollout["truncated"]
    rollout["truncated"] = torch.zeros_like(rollout["truncated"])
    ours, _ = run_gae(rollout, 0.99, 0.95)
    theirs = sb3_advantages(rollout, rollout["rewards"], rollout["terminated"], 0.99, 0.95)
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-5)


def test_gae_equals_stable_baselines3_with_time_limits():
    rollout = make_rollout(4, steps=40, rows=5, end=0.2, skip=0.0)
    assert rollout["truncated"].any()
    ours, _ = run_gae(rollout, 0.99, 0.95)
    # Stable-Baselines3 adds the discounted value of the final observation to the reward and treats the end as terminal
    rewards = rollout["rewards"] + 0.99 * rollout["final_values"] * rollout["truncated"]
    theirs = sb3_advantages(rollout, rewards, rollout["terminated"] | rollout["truncated"], 0.99, 0.95)
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.integers(1, 12), st.floats(0, 1), st.floats(0, 1))
def test_skipping_invalid_steps_equals_removing_them(seed, steps, gamma, lam):
    rollout = make_rollout(seed, steps, rows=1, skip=0.4)
    kept = rollout["valid"][:, 0]
    packed = {name: value if name == "last_values" else value[kept] for name, value in rollout.items()}
    for whole, part in zip(run_gae(rollout, gamma, lam), run_gae(packed, gamma, lam), strict=True):
        assert torch.equal(whole[kept], part)
        assert not whole[~kept].any()


def test_chunks_unfold_in_the_order_of_env_steps():
    chunks = torch.arange(2 * 3 * 4).reshape(2, 3, 4)  # H B C
    steps = A.time_major(chunks)
    assert steps[:, 1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert torch.equal(A.chunk_major(steps, 4), chunks)


def test_a_chunk_is_a_discounted_sum_and_its_bootstrap_is_discounted_by_its_length():
    rewards = torch.tensor([[[1.0, 2.0, 4.0], [1.0, 2.0, 9.0], [9.0, 9.0, 9.0]]])
    valid = torch.tensor([[[True, True, True], [True, True, False], [False, False, False]]])
    truncated = torch.tensor([[[False] * 3, [False, True, False], [False] * 3]])
    chunks = A.chunk_steps(rewards, torch.zeros_like(valid), truncated, valid, 0.5)
    assert chunks.rewards.tolist() == [[3.0, 2.0, 0.0]]  # 1 + 1 + 1; 1 + 1; nothing
    assert chunks.discount.tolist() == [[0.125, 0.25, 1.0]]
    assert chunks.truncated.tolist() == [[False, True, False]]
    assert chunks.valid.tolist() == [[True, True, False]]


def test_group_advantages_have_no_mean_and_unit_deviation():
    returns = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 2.0, 6.0], [0.5, 0.5, 0.5, 0.5]])
    advantages = A.group_advantages(returns)
    # group 0: mean 1/2, std sqrt(4 * 1/4 / 3) = 0.57735, so 0.5 / 0.57735 = 0.86603
    torch.testing.assert_close(advantages[0], torch.tensor([0.86603, -0.86603, -0.86603, 0.86603]), atol=1e-4, rtol=0)
    torch.testing.assert_close(advantages[1].std(), torch.tensor(1.0), atol=1e-4, rtol=0)
    assert advantages[2].tolist() == [0.0] * 4
    assert A.group_advantages(torch.tensor([[7.0]])).tolist() == [[0.0]]


@pytest.mark.parametrize("size", range(2, 17))
def test_equal_returns_have_an_advantage_of_exactly_zero(size):
    returns = torch.linspace(-2, 2, 401)[:, None].expand(-1, size)  # most means of these are rounded
    for advantages in (A.group_advantages(returns), A.leave_one_out_advantages(returns)):
        assert not advantages.any()


def test_groups_without_spread_in_the_raw_metric_are_named():
    raw = torch.tensor([[True, True], [True, False], [False, False]])
    assert A.nonzero_variance_groups(raw).tolist() == [False, True, False]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 6))
def test_statistics_from_block_sums_are_those_of_the_whole(seed, num_blocks):
    draw = torch.Generator().manual_seed(seed)
    advantages = torch.randn(7, 2 * num_blocks, generator=draw) * 3 + 1
    valid = torch.rand(advantages.shape, generator=draw) < 0.7
    valid[0] = True
    garbage = torch.where(valid, advantages, torch.nan)
    blocks = dict(enumerate(zip(garbage.chunk(num_blocks, 1), valid.chunk(num_blocks, 1), strict=True)))
    found = A.standardized(blocks, Reducer(SoloGroup(), [0] * len(blocks)).sum_blocks)
    kept = advantages[valid]
    expected = (kept - kept.mean()) / kept.std(correction=0)
    torch.testing.assert_close(torch.cat([*found.values()], 1)[valid], expected, rtol=1e-4, atol=1e-5)
