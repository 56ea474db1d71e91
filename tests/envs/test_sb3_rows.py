"""Envs of this project behind Stable-Baselines3's interface: its checks, and its PPO on ManiSkill."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecCheckNan

from envs.point_reach import make_env as make_point
from envs.sb3 import StableBaselinesVec
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError

N = 3
POINT = EnvConfig(
    task="PointReach-v0", num_envs=N, block_size=N, chunk=1, horizon=6, obs_size=8, cameras=["a"], hold_steps=1
)


def sb3(observations: str = "state") -> StableBaselinesVec:
    return StableBaselinesVec(make_point(POINT, N, render_final=True), observations)


def test_another_chunk_or_a_missing_camera_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.chunk is 2"):
        StableBaselinesVec(make_point(EnvConfig(chunk=2, horizon=6, hold_steps=1, cameras=["a"]), N))
    with pytest.raises(ConfigError, match=r"observations is 'dict', but env\.cameras is \[\]"):
        StableBaselinesVec(make_point(EnvConfig(chunk=1, horizon=6, hold_steps=1, cameras=[]), N), "dict")
    with pytest.raises(ConfigError, match="observations is 'states'"):
        sb3("states")


@pytest.mark.parametrize("observations", ["state", "proprio", "dict"])
def test_what_sb3_sees_is_finite_in_its_spaces_and_repeats_with_the_seed(observations: str) -> None:
    env = VecCheckNan(sb3(observations), raise_exception=True)
    env.action_space.seed(0)
    actions, runs = np.stack([[env.action_space.sample() for _ in range(N)] for _ in range(8)]), []
    for _ in range(2):
        env.seed(5)
        runs.append([env.reset(), *(env.step(action)[0] for action in actions)])
    assert data_equivalence(runs[0], runs[1], exact=True)
    first = runs[0][-1]
    row = {name: value[0] for name, value in first.items()} if isinstance(first, dict) else first[0]
    assert row in env.observation_space


def test_sb3_learns_of_time_limits_and_last_observations() -> None:
    env = sb3()
    env.seed(1)
    env.reset()
    infos = [env.step(np.zeros((N, 2), np.float32)) for _ in range(6)]
    last = infos[-1]
    assert last[2].all()
    for row, info in enumerate(last[3]):
        assert info["TimeLimit.truncated"] is True
        assert info["episode"]["l"] == 6
        assert info["is_success"] is False
        assert not np.array_equal(info["terminal_observation"], last[0][row])


@pytest.mark.sim
def test_sb3s_ppo_trains_on_batched_maniskill() -> None:
    from envs.sb3 import make_sb3

    env = make_sb3("PickCube-v1", num_envs=4, horizon=10, control_mode="pd_joint_delta_pos")
    model = PPO("MlpPolicy", env, n_steps=12, batch_size=24, n_epochs=1, seed=0).learn(96)
    assert "batched" in env.get_attr("spec")[0].backend
    assert [info["l"] for info in model.ep_info_buffer] == [10] * 4 * 2
    env.close()
