"""The vector env that LeRobot gets steps as the env behind it."""

from __future__ import annotations

import numpy as np
import torch

from envs import point_reach
from experiments.lerobot_plug_in.lerobot_env_rlinf_embodied import LeRobotVectorEnv
from rlinf_embodied.config import EnvConfig

CONFIG = EnvConfig(
    task="PointReach-v0", num_envs=3, block_size=3, chunk=1, horizon=6, obs_size=16, cameras=["a"], hold_steps=1
)


def test_rows_are_those_of_the_env_and_begin_anew_when_they_end() -> None:
    plain, env = (point_reach.make_env(CONFIG, 3) for _ in range(2))
    vector = LeRobotVectorEnv(env)
    shown, seeds = plain.reset([5, 6, 7]), [8, 9, 10]
    seen, _ = vector.reset(seed=5)
    ends = 0
    for _ in range(8):
        assert seen in vector.observation_space
        np.testing.assert_array_equal(seen["pixels"]["a"], shown.images["a"].numpy())
        np.testing.assert_array_equal(seen["agent_pos"], shown.proprio.numpy())
        actions = env.expert_actions().numpy()
        result = plain.step_chunk(torch.from_numpy(actions)[:, None], seeds)
        seen, rewards, terminated, truncated, info = vector.step(actions)
        shown, ended = result.observation, {end.row: end.metrics["success_once"] > 0 for end in result.episodes}
        np.testing.assert_array_equal(rewards, result.rewards[:, 0].numpy())
        assert (terminated | truncated).nonzero()[0].tolist() == sorted(ended)
        if ended:
            seeds, ends = [seed + 3 for seed in seeds], ends + len(ended)
            assert info["final_info"]["is_success"].tolist() == [ended.get(row, False) for row in range(3)]
    assert ends > 3
    assert vector.call("task_description") == ("move the point to the goal",) * 3
    assert vector.get_attr("_max_episode_steps") == (6, 6, 6)
    assert vector.call("render")[0].shape == (256, 256, 3)
    vector.close()
