"""Advantages of whole rollouts against loops over single episodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlinf_embodied.algorithms.batch import EnvColumns, PolicyColumns, TrainingBlock
from rlinf_embodied.algorithms.clipped_objective import Estimator, Normalization
from rlinf_embodied.algorithms.grpo import GRPO, GRPOConfig, grpo_block
from rlinf_embodied.algorithms.on_policy import OnPolicyConfig
from rlinf_embodied.algorithms.ppo import PPO, PPOConfig, ppo_block
from rlinf_embodied.config import Critic, Level
from rlinf_embodied.interfaces.envs import Observation
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.runtime.host import StepContext
from tests.observations import observed, stacked

GAMMA, LAMBDA = 0.9, 0.8


class ReadsItsInput:
    """A critic whose value of a state is written in the state: as privileged state, or as a pixel."""

    def encode(self, observation: Observation) -> dict[str, Tensor]:
        return {"v": stacked(observation)[:, 0, 0, 0, 0].to(torch.float32) / 100}

    def value(self, features: dict[str, Tensor], privileged: Tensor | None) -> Tensor:
        if privileged is not None:
            return privileged[..., 0]
        return features["v"][:, None] + 0.1 * torch.arange(self.chunk)

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk


@dataclass
class Rollout:
    policy: PolicyColumns
    env: EnvColumns
    values: Tensor  # [H, B, C]
    final_values: dict[tuple[int, int], float]  # (chunk-step, row) -> V of the final observation
    last_values: Tensor  # [B]


@st.composite
def rollouts(draw, sees_images: bool = False) -> Rollout:
    """Rollouts whose episodes end anywhere; after an end the chunk's rest is not valid and a new episode begins."""
    h, b, c = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    freeze = draw(st.booleans())
    shape = (h, b, c)
    valid, terminated, truncated = np.ones(shape, bool), np.zeros(shape, bool), np.zeros(shape, bool)
    index = []
    for row in range(b):
        for step in range(h):
            if freeze and any(i[1] == row for i in index):
                valid[step, row] = False
            elif random.random() < 0.5:
                end = int(random.integers(c))
                valid[step, row, end + 1 :] = False
                (terminated if random.random() < 0.5 else truncated)[step, row, end] = True
                index.append((step, row))
    index.sort()
    draw_values = lambda *size: torch.from_numpy(random.integers(0, 200, size).astype(np.uint8))  # noqa: E731
    seen, finals, last = draw_values(h, b), draw_values(len(index)), draw_values(b)
    privileged = None if sees_images else torch.from_numpy(random.normal(size=(*shape, 2)).astype(np.float32))
    pixels = seen.to(torch.float32)[..., None] / 100 + 0.1 * torch.arange(c)
    values = pixels if privileged is None else privileged[..., 0]
    rewards = torch.from_numpy(np.where(valid, random.normal(size=shape), 0.0).astype(np.float32))
    env = EnvColumns(
        rewards,
        *(torch.from_numpy(flags) for flags in (terminated, truncated, valid)),
        privileged=privileged,
        last=showing(last, sees_images),
        final_index=torch.tensor(index, dtype=torch.long).reshape(-1, 2),
        final=showing(finals, sees_images) if index else None,
        success=torch.from_numpy(random.random(b) < 0.5),
    )
    order = torch.arange(h * b).reshape(h, b)
    tokens = order[:, :, None, None].expand(*shape, 1)
    policy = PolicyColumns(
        {"v": seen.to(torch.float32) / 100, "order": order}, {"tokens": tokens}, torch.zeros(*shape, 1), 0
    )
    final_values = dict(zip(index, (finals.to(torch.float32) / 100).tolist(), strict=True))
    return Rollout(policy, env, values, final_values, last.to(torch.float32) / 100)


def showing(values: Tensor, sees: bool) -> Observation:
    """Observations of which ReadsItsInput reads these values, in hundredths."""
    n = len(values)
    images = values.reshape(n, 1, 1, 1, 1).expand(n, 1, 1, 1, 3).contiguous()
    privileged = torch.stack([values.to(torch.float32) / 100, torch.zeros(n)], 1)
    return observed(torch.zeros(n, 1), ("",) * n, images if sees else None, None if sees else privileged)


def algorithm(**changes) -> OnPolicyConfig:
    return PPOConfig(gamma=GAMMA, gae_lambda=LAMBDA, **changes)


def episodes_of(rollout: Rollout, row: int) -> list[list[tuple[int, int]]]:
    """The (chunk-step, sub-step) pairs of each episode of a row, in order."""
    found: list[list[tuple[int, int]]] = [[]]
    h, _, c = rollout.env.valid.shape
    for step in range(h):
        for k in range(c):
            if rollout.env.valid[step, row, k]:
                found[-1].append((step, k))
                if rollout.env.terminated[step, row, k] or rollout.env.truncated[step, row, k]:
                    found.append([])
    return [episode for episode in found if episode]


def naive_gae(rollout: Rollout, bootstrap: bool) -> tuple[np.ndarray, np.ndarray]:
    """A_t = sum_k (gamma lambda)^k delta_{t+k} over the rest of the episode, episode by episode."""
    advantages, returns = np.zeros(rollout.values.shape), np.zeros(rollout.values.shape)
    for row in range(rollout.values.shape[1]):
        for episode in episodes_of(rollout, row):
            values = [float(rollout.values[step, row, k]) for step, k in episode]
            step, k = episode[-1]
            ended_by_time = bool(rollout.env.truncated[step, row, k])
            if bool(rollout.env.terminated[step, row, k]) or (ended_by_time and not bootstrap):
                after = 0.0
            else:
                after = rollout.final_values[step, row] if ended_by_time else float(rollout.last_values[row])
            following = [*values[1:], after]
            rewards = [float(rollout.env.rewards[s, row, j]) for s, j in episode]
            deltas = [r + GAMMA * n - v for r, n, v in zip(rewards, following, values, strict=True)]
            for t, (s, j) in enumerate(episode):
                rest = [(GAMMA * LAMBDA) ** i * delta for i, delta in enumerate(deltas[t:])]
                advantages[s, row, j] = sum(rest)
                returns[s, row, j] = sum(rest) + values[t]
    return advantages, returns


def spread(block: TrainingBlock, values: Tensor, shape: torch.Size) -> np.ndarray:
    """Puts samples back to where they came from; `order` numbers them in the rollout."""
    whole = np.zeros((shape[0] * shape[1], shape[2]))
    whole[block.features["order"].numpy()] = torch.where(block.valid, values, 0.0).numpy()
    return whole.reshape(*shape)


def critic_of(rollout: Rollout) -> Critic:
    return Critic.observation if rollout.env.privileged is None else Critic.privileged


@given(rollout=st.booleans().flatmap(rollouts), bootstrap=st.sampled_from([None, False, True]))
@settings(max_examples=60)
def test_ppo_advantages_and_targets_are_those_of_a_loop_over_episodes(rollout: Rollout, bootstrap: bool | None) -> None:
    chunk = rollout.values.shape[2]
    config = algorithm(bootstrap_at_timeout=bootstrap)
    block = ppo_block(ReadsItsInput(chunk), [(rollout.policy, rollout.env)], config, critic_of(rollout))  # pyright: ignore[reportArgumentType]
    sees_no_time = critic_of(rollout) is Critic.observation
    advantages, returns = naive_gae(rollout, sees_no_time if bootstrap is None else bootstrap)
    assert block.returns is not None
    np.testing.assert_allclose(spread(block, block.advantages, rollout.values.shape), advantages, atol=1e-4)
    np.testing.assert_allclose(spread(block, block.returns, rollout.values.shape), returns, atol=1e-4)
    kept = rollout.env.valid.any(-1).reshape(-1).nonzero()[:, 0]
    assert torch.equal(block.features["order"], kept)  # every chunk with a valid action, and only those
    assert torch.equal(block.weights, block.valid.to(torch.float32))


@given(rollout=rollouts(), bootstrap=st.booleans())
@settings(max_examples=40)
def test_with_a_ratio_per_chunk_a_chunk_is_one_step(rollout: Rollout, bootstrap: bool) -> None:
    config = algorithm(bootstrap_at_timeout=bootstrap, ratio_level=Level.chunk)
    block = ppo_block(ReadsItsInput(1), [(rollout.policy, rollout.env)], config)  # pyright: ignore[reportArgumentType]
    expected = np.zeros(rollout.values.shape)
    for row in range(rollout.values.shape[1]):
        for episode in episodes_of(rollout, row):
            chunks = sorted({step for step, _ in episode})
            step, k = episode[-1]
            by_time = bool(rollout.env.truncated[step, row, k])
            ended = bool(rollout.env.terminated[step, row, k]) or (by_time and not bootstrap)
            after = rollout.final_values[step, row] if by_time else float(rollout.last_values[row])
            values = [float(rollout.values[s, row, 0]) for s in chunks] + [0.0 if ended else after]
            deltas, decays = [], []
            for i, s in enumerate(chunks):
                parts = [(j, float(rollout.env.rewards[s, row, j])) for q, j in episode if q == s]
                reward = sum(GAMMA**j * r for j, r in parts)
                deltas.append(reward + GAMMA ** len(parts) * values[i + 1] - values[i])
                decays.append((GAMMA * LAMBDA) ** len(parts))
            for i, s in enumerate(chunks):
                total, factor = 0.0, 1.0
                for j in range(i, len(chunks)):
                    total, factor = total + factor * deltas[j], factor * decays[j]
                expected[s, row] = np.where(rollout.env.valid[s, row], total, 0.0)
    np.testing.assert_allclose(spread(block, block.advantages, rollout.values.shape), expected, atol=1e-4)


# --------------------------------------------------------------------------------------------------------------- grpo
def grpo(**changes) -> OnPolicyConfig:
    return GRPOConfig(group_size=2, **changes)


def round_of(lengths: list[int], rewards: list[float], success: list[bool], number: int = 0) -> tuple:
    """One episode per row of chunks of 2 actions, of these lengths; the reward comes with the last step."""
    b, c = len(lengths), 2
    h = -(-max(lengths) // c)
    steps = torch.arange(h * c).reshape(h, 1, c).expand(h, b, c)
    last = torch.tensor(lengths)[None, :, None] - 1
    env = EnvColumns(
        rewards=torch.where(steps == last, torch.tensor(rewards)[None, :, None], 0.0),
        terminated=steps == last,
        truncated=torch.zeros(h, b, c, dtype=torch.bool),
        valid=steps <= last,
        privileged=None,
        last=observed(torch.zeros(b, 1), ("",) * b),
        final_index=torch.zeros(0, 2, dtype=torch.long),
        final=None,
        success=torch.tensor(success),
        round=number,
    )
    order = torch.arange(h * b).reshape(h, b) + 1000 * number
    tokens = torch.zeros(h, b, c, 3, dtype=torch.long)
    return PolicyColumns({"order": order}, {"tokens": tokens}, torch.zeros(h, b, c, 3), 0), env


def test_grpo_compares_the_members_of_a_group_by_success_or_by_reward() -> None:
    rollout = round_of([2, 2, 2, 2], [1.0, 3.0, 0.0, 0.0], [True, False, False, False])
    every = {(0, 0), (0, 1)}
    # two members: (R - mean) / std with std = |difference| / sqrt 2 gives +-1 / sqrt 2
    by_success = grpo_block([rollout], grpo(success_only=True), 0, every)
    np.testing.assert_allclose(by_success.advantages[:, 0], [2**-0.5, -(2**-0.5), 0, 0], atol=1e-5)
    by_reward = grpo_block([rollout], grpo(success_only=False), 0, every)
    np.testing.assert_allclose(by_reward.advantages[:, 0], [-(2**-0.5), 2**-0.5, 0, 0], atol=1e-5)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # returns 1 and 3 of the first group, 0 and 5 of the second
    [("dr_grpo", [-1, 1, -2.5, 2.5]), ("rloo", [-2, 2, -5, 5]), ("reinforce_pp", [-1, 1, -2.5, 2.5])],
)
def test_other_estimators_compare_a_group_as_their_papers_do(estimator: str, expected: list[float]) -> None:
    rollout = round_of([2, 2, 2, 2], [1.0, 3.0, 0.0, 5.0], [True] * 4)
    config, every = grpo(success_only=False, estimator=Estimator(estimator)), {(0, 0), (0, 1)}
    assert grpo_block([rollout], config, 0, every).advantages[:, 0].tolist() == expected
    alone = GRPO.__new__(GRPO)
    alone.algorithm, alone.training = config, SimpleNamespace(reducer=Reducer(SoloGroup(), (0,)))  # pyright: ignore
    (made,) = alone.samples(StepContext(0, message=tuple(every)), {0: [rollout]}).values()
    scale = np.std(expected) if estimator == "reinforce_pp" else 1.0  # of all episodes: their actions are as many
    np.testing.assert_allclose(made.advantages[:, 0], np.array(expected) / scale, rtol=1e-5)


def test_advantages_are_normalised_within_each_task_of_all_workers() -> None:
    tasks = torch.tensor([7, 9, 7, 9, 9, 7])
    advantages = torch.tensor([[1.0], [30.0], [3.0], [10.0], [20.0], [5.0]])
    valid = torch.ones(6, 1, dtype=torch.bool)
    part = lambda rows: TrainingBlock(  # noqa: E731
        *({}, {}, valid[rows, :, None].float(), valid[rows], advantages[rows], valid[rows].float(), None, None, None),
        tasks=tasks[rows],
    )
    ppo = PPO.__new__(PPO)
    ppo.algorithm, reducer = PPOConfig(normalize_advantages=Normalization.task), Reducer(SoloGroup(), (0, 0))
    ppo.training = SimpleNamespace(reducer=reducer)  # pyright: ignore
    made = ppo._normalised({0: part(slice(0, 3)), 1: part(slice(3, 6))})
    found = torch.cat([made[0].advantages, made[1].advantages])[:, 0].numpy()
    for task, own in ((7, [0, 2, 5]), (9, [1, 3, 4])):
        values = advantages[tasks == task, 0].numpy()
        np.testing.assert_allclose(found[own], (values - values.mean()) / (values.std() + 1e-8), rtol=1e-5)


def test_groups_that_were_dropped_leave_no_sample_and_resamples_join_in_the_order_of_rounds() -> None:
    first = round_of([2, 4, 2, 2], [0] * 4, [True, False, True, True])
    second = round_of([2, 2, 4, 2], [0] * 4, [True, True, False, True], number=1)
    # block 3 has the groups 6 and 7; kept are group 6 of round 0 and group 7 of round 1
    block = grpo_block([first, second], grpo(), 3, {(0, 6), (1, 7), (0, 1), (1, 0)})
    assert block.features["order"].tolist() == [0, 1, 5, 1002, 1003, 1006]
    assert bool((block.weights[block.valid] > 0).all())
    assert len(grpo_block([first, second], grpo(), 0, {(0, 6), (1, 7)})) == 0


def test_normalised_by_length_every_episode_weighs_the_same() -> None:
    lengths = [1, 2, 3, 6]
    rollout = round_of(lengths, [0.0] * 4, [True, False, True, False])
    every = {(0, 0), (0, 1)}
    for normalized in (True, False):
        block = grpo_block([rollout], grpo(length_normalized=normalized), 0, every)
        rows = block.features["order"] % 4
        totals = [float(block.weights[rows == row].sum()) for row in range(4)]
        assert totals == pytest.approx([1.0] * 4 if normalized else lengths)


def test_rewards_after_the_end_of_an_episode_do_not_count() -> None:
    policy, env = round_of([1, 3], [1.0, 1.0], [True, True])
    noisy = replace(env, rewards=torch.where(env.valid, env.rewards, 100.0))
    block = grpo_block([(policy, noisy)], grpo(success_only=False), 0, {(0, 0)})
    assert float(block.advantages.abs().max()) == 0.0
