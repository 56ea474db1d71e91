"""When an episode ends and when its bonus is paid, on a simulator that is solved in given steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from envs.episodes import EpisodeEnv
from envs.point_reach import make_env as make_point
from envs.simulator import Measurement, Simulator
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.errors import SimulatorError
from rlinf_embodied.interfaces.envs import CLOCK_COLUMNS
from tests.observations import stacked


class Scripted(Simulator):
    """One row that is solved after step t where `solved[t - 1]` is "1", and fails where it is "x"."""

    backend, num_rows, action_dim = "scripted", 1, 2

    def __init__(self, solved: str) -> None:
        self._solved, self._steps = solved, 0

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        self._steps = 0

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        self._steps += 1

    def measure(self, actions: Tensor) -> Measurement:
        now = "0" if self._steps == 0 else self._solved[self._steps - 1]
        nothing = torch.zeros(1, 1)
        solved, failed = (torch.tensor([now == sign]) for sign in "1x")
        return Measurement(torch.zeros(1), solved, nothing, failed, nothing)

    def images(self, rows: Sequence[int]) -> dict[str, Tensor]:
        return {"base_camera": torch.zeros(len(rows), 4, 4, 3, dtype=torch.uint8)}


def episode(
    solved: str, hold_steps: int, paid_at_timeout: bool | None = None
) -> tuple[list[float], bool, dict[str, float]]:
    """Returns the rewards of an episode's steps, whether the task (not the time) ended it, and its metrics."""
    config = EnvConfig(
        num_envs=1,
        block_size=1,
        chunk=1,
        horizon=len(solved),
        obs_size=4,
        hold_steps=hold_steps,
        bonus_at_timeout=paid_at_timeout,
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
@pytest.mark.parametrize(
    ("overrides", "pays"),
    [
        ("algorithm.bootstrap_at_timeout=false", True),
        ("algorithm.bootstrap_at_timeout=true", False),  # the value after it is learned from: a bonus would count twice
        ("policy.critic=observation", False),
        ("algorithm=grpo", True),
        ("policy=soft_actor algorithm=sac env.cameras=[] env.hold_steps=1", False),
        ("hierarchy.every=2 hierarchy.instructions=[a,b] warm_start.checkpoint=x", False),  # its high level bootstraps
        ("algorithm.bootstrap_at_timeout=false env.bonus_at_timeout=false", False),
    ],
)
def test_a_time_out_while_the_task_is_solved_is_paid_where_no_value_counts_after_it(
    hold_steps: int, overrides: str, pays: bool
) -> None:
    resolved = compose_train(overrides.split()).env.bonus_at_timeout
    assert resolved is pays
    rewards, by_task, metrics = episode("0110000111", hold_steps, resolved)
    assert (rewards, by_task) == ([0.0] * 9 + [float(pays)], False)
    assert metrics["success_at_end"] == 1.0


def test_privileged_state_tells_when_the_task_will_have_been_solved_long_enough() -> None:
    sizes = {"num_envs": 1, "block_size": 1, "chunk": 5, "horizon": 10, "obs_size": 4, "chunks_per_rollout": 2}
    env = EpisodeEnv(EnvConfig(**sizes, hold_steps=4), Scripted("0110111100"), "wait", False)
    env.reset([0])
    shown = [env.step_chunk(torch.zeros(1, 5, 2)).privileged for _ in range(2)]
    held = torch.cat([part for part in shown if part is not None], 1)[0, :8, -1]
    assert held.tolist() == [-1.0, -1.0, -0.5, 0.0, -1.0, -0.5, 0.0, 0.5]  # before each action; the eighth ends it


def test_a_task_that_fails_ends_the_episode_unless_episodes_never_end_early() -> None:
    assert len(episode("00x0", 1)[0]) == 3
    assert len(episode("00x0", 0)[0]) == 4


class Counting(Simulator):
    """Steps all rows at once, whichever are asked for, as a GPU does; row k is solved in step k + 1, images count."""

    num_rows, action_dim = 3, 1

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        self._steps = 0

    def step(self, actions: Tensor, rows: Sequence[int]) -> None:
        self._steps += 1

    def measure(self, actions: Tensor) -> Measurement:
        solved = torch.arange(1, 4) == getattr(self, "_steps", 0)
        return Measurement(torch.zeros(3), solved, torch.zeros(3, 1))

    def images(self, rows: Sequence[int]) -> dict[str, Tensor]:
        return {"base_camera": torch.full((len(rows), 4, 4, 3), self._steps, dtype=torch.uint8)}


def test_the_last_image_of_an_episode_is_of_the_step_in_which_it_ends() -> None:
    sizes = {"num_envs": 3, "block_size": 3, "chunk": 4, "horizon": 4, "obs_size": 4, "chunks_per_rollout": 1}
    env = EpisodeEnv(EnvConfig(**sizes, hold_steps=1), Counting(), "wait", True)
    env.reset([0, 1, 2])
    final = env.step_chunk(torch.zeros(3, 4, 1)).final_observation
    assert final is not None
    assert stacked(final)[:, 0, 0, 0, 0].tolist() == [1, 2, 3]


class Bare(Simulator):
    """No more than a simulator needs, and what it measures is given."""

    num_rows, action_dim = 2, 3

    def __init__(self, **measured: object) -> None:
        good = {"reward": torch.zeros(2), "success": torch.zeros(2, dtype=torch.bool), "proprio": torch.zeros(2, 4)}
        self._measured = good | measured

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None: ...

    def step(self, actions: Tensor, rows: Sequence[int]) -> None: ...

    def measure(self, actions: Tensor) -> Measurement:
        return Measurement(**self._measured)


TWO = EnvConfig(num_envs=2, block_size=2, horizon=10, chunks_per_rollout=2, cameras=[], _target_="my_robot.make_env")


def test_what_a_simulator_leaves_out_has_a_default() -> None:
    env = EpisodeEnv(TWO, Bare(), "wait", False)
    seen = env.reset([0, 1])
    assert not seen.images
    assert seen.privileged is not None
    assert seen.privileged.shape == (2, 4 + CLOCK_COLUMNS)
    assert env.object_positions() is None
    env.record([0, 1])
    results = [env.step_chunk(torch.zeros(2, 5, 3)) for _ in range(2)]
    assert not any(result.terminated.any() for result in results)
    assert env.take_frames() == {}
    with pytest.raises(SimulatorError, match=r"no scripted expert: .*warm_start.from_scratch=true"):
        env.expert_actions()
    env.close()
    with pytest.raises(SimulatorError, match=r"Bare renders none: set env.cameras=\[\]"):
        EpisodeEnv(replace(TWO, cameras=["front"]), Bare(), "wait", False).reset([0, 1])


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        ({"proprio": torch.zeros(2, 4, dtype=torch.float64)}, r"proprio as float64 \[2, 4\], but float32 \[2, D\]"),
        ({"reward": torch.zeros(2, 1)}, r"reward as float32 \[2, 1\], but float32 \[2\] is needed"),
        ({"success": torch.zeros(2)}, r"success as float32 \[2\], but bool \[2\]"),
        ({"proprio": [0.0]}, r"proprio as a list, but float32"),
        ({"privileged": torch.zeros(3, 4)}, r"privileged as float32 \[3, 4\], but float32 \[2, D\]"),
        ({"fail": torch.zeros(2, dtype=torch.long)}, r"fail as int64 \[2\], but bool \[2\]"),
        ({"reward": torch.tensor([0.0, torch.nan])}, r"reward that is NaN or infinite in rows 1: .*`fail`"),
        ({"proprio": torch.full((2, 4), torch.inf)}, r"proprio that is NaN or infinite in rows 0, 1"),
    ],
)
def test_a_wrong_measurement_is_named_when_the_env_is_built(measured: dict[str, object], says: str) -> None:
    with pytest.raises(SimulatorError, match=rf"Bare\.measure returned {says}"):
        EpisodeEnv(TWO, Bare(**measured), "wait", False)


def point_env(chunk: int, execute_steps: int, horizon: int, history: int = 1) -> EpisodeEnv:
    config = EnvConfig(
        **{"num_envs": 2, "block_size": 2, "chunk": chunk, "execute_steps": execute_steps, "horizon": horizon},
        **{"chunks_per_rollout": 0, "hold_steps": 0, "obs_size": 8, "reward": Reward.dense},
        history=history,
    )
    return make_point(config, 2, render_final=True)


def test_a_chunk_is_executed_in_part_and_a_horizon_is_no_multiple_of_it() -> None:
    """Chunks of 5 of which 2 steps are executed give what chunks of 2 do; the last one of 7 steps is cut short."""
    whole, part = point_env(2, 0, 7), point_env(5, 2, 7)
    assert part.spec.executed == 2
    assert part.spec.chunks_per_episode == whole.spec.chunks_per_episode == 4
    assert torch.equal(whole.reset([3, 4]).privileged, part.reset([3, 4]).privileged)
    actions = torch.rand(4, 2, 5, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for k, action in enumerate(actions):
        ours, theirs = part.step_chunk(action, [5, 6]), whole.step_chunk(action[:, :2], [5, 6])
        for name in ("rewards", "terminated", "truncated", "valid", "success", "privileged"):
            column = getattr(ours, name)
            assert column.shape[:2] == (2, 5)
            assert torch.equal(column[:, :2], getattr(theirs, name))
            assert not column[:, 2:].any()
        assert torch.equal(ours.observation.privileged, theirs.observation.privileged)
        assert torch.equal(stacked(ours.observation), stacked(theirs.observation))
        assert ours.truncated[:, 0].tolist() == [k == 3] * 2
    assert [end.metrics["episode_len"] for end in ours.episodes] == [7.0, 7.0]


def test_a_history_is_of_env_steps_within_chunks_too_and_begins_with_its_episode() -> None:
    single, stack = point_env(1, 0, 4), point_env(2, 0, 4, history=3)
    seen = [single.reset([3, 4])]
    begun, actions = stack.reset([3, 4]), torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    results = [single.step_chunk(actions[:, k : k + 1]) for k in range(4)]
    seen += [result.observation for result in results[:3]]
    assert results[3].final_observation is not None
    seen.append(results[3].final_observation)
    first, last = (stack.step_chunk(actions[:, k : k + 2], [5, 6]) for k in (0, 2))
    final = last.final_observation
    assert final is not None
    for shown, steps in ((begun, [0, 0, 0]), (first.observation, [0, 1, 2]), (final, [2, 3, 4])):
        assert torch.equal(shown.proprio, torch.cat([seen[k].proprio for k in steps], 1))
        assert torch.equal(stacked(shown), torch.stack([stacked(seen[k]) for k in steps], 2))
    again = single.reset([5, 6])
    assert torch.equal(last.observation.proprio, again.proprio.repeat(1, 3))
    assert torch.equal(stacked(last.observation)[:, :, 0], stacked(again))
    assert torch.equal(final.with_proprio(final.proprio + 1).state["proprio"], final.state["proprio"] + 1)
