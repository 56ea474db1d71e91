"""When an episode ends and when its bonus is paid, on a simulator that is solved in given steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from envs.episodes import EpisodeEnv
from envs.simulator import Measurement
from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.errors import ConfigError


class Scripted:
    """One row that is solved after step t where `solved[t - 1]` is "1", and fails where it is "x"."""

    backend, num_rows, action_dim, device, expert = "scripted", 1, 2, torch.device("cpu"), None

    def __init__(self, solved: str) -> None:
        self._solved, self._steps = solved, 0

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        self._steps = 0

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        self._steps += 1

    def measure(self, actions: Tensor) -> Measurement:
        now = "0" if self._steps == 0 else self._solved[self._steps - 1]
        nothing = torch.zeros(1, 1)
        return Measurement(torch.zeros(1), torch.tensor([now == "1"]), torch.tensor([now == "x"]), nothing, nothing)

    def pictures(self, rows: Sequence[int]) -> Tensor:
        return torch.zeros(len(rows), 1, 4, 4, 3, dtype=torch.uint8)

    def object_positions(self) -> None:
        return None


def episode(solved: str, hold_steps: int) -> tuple[list[float], bool, dict[str, float]]:
    """Returns the rewards of an episode's steps, whether the task (not the time) ended it, and its metrics."""
    config = EnvConfig(
        num_envs=1,
        block_size=1,
        chunk=1,
        horizon=len(solved),
        obs_size=4,
        hold_steps=hold_steps,
        reward=Reward.sparse,
        chunks_per_rollout=len(solved),
    )
    env = EpisodeEnv(config, Scripted(solved), "wait", False)
    env.reset([0])
    rewards = []
    while True:
        result = env.step_chunk(torch.zeros(1, 1, 2))
        rewards.append(float(result.rewards[0, 0]))
        if result.episodes:
            return rewards, bool(result.terminated.any()), dict(result.episodes[0].metrics)


@pytest.mark.parametrize(
    ("hold_steps", "length", "terminated"),
    [(1, 2, True), (2, 3, True), (3, 8, True), (4, 9, True), (5, 10, False), (0, 10, False)],
)
def test_an_episode_ends_when_the_task_has_stayed_solved_and_the_bonus_is_paid_then(
    hold_steps: int, length: int, terminated: bool
) -> None:
    rewards, by_task, metrics = episode("0110011110", hold_steps)
    assert len(rewards) == length == metrics["episode_len"]
    assert rewards == [0.0] * (length - 1) + [float(terminated)]
    assert by_task == terminated
    assert metrics["success_once"] == 1.0
    assert metrics["success_at_end"] == float(terminated)


@pytest.mark.parametrize("hold_steps", [0, 5])
def test_an_episode_whose_time_is_over_while_it_is_solved_is_paid(hold_steps: int) -> None:
    rewards, by_task, metrics = episode("0110000111", hold_steps)
    assert (rewards, by_task) == ([0.0] * 9 + [1.0], False)
    assert metrics["success_at_end"] == 1.0


def test_a_task_that_fails_ends_the_episode_unless_episodes_never_end_early() -> None:
    assert len(episode("00x0", 1)[0]) == 3
    assert len(episode("00x0", 0)[0]) == 4


def test_to_stay_solved_for_longer_than_an_episode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env.hold_steps is 60, but it lies in \[0, env.horizon=50\]"):
        EnvConfig(hold_steps=60)
