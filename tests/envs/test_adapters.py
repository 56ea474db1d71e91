"""Envs of this project in the hands of Gymnasium and Stable-Baselines3: their checks, and SB3's PPO on ManiSkill."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_space_limit, data_equivalence
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecCheckNan, VecNormalize

from envs.adapters import GymnasiumVector
from envs.gym.env import make_env as make_gymnasium
from envs.point_reach import make_env as make_point
from envs.sb3 import StableBaselinesVec
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.errors import ConfigError

N = 3
POINT = EnvConfig(
    task="PointReach-v0", num_envs=N, block_size=N, chunk=1, horizon=6, obs_size=8, cameras=["a"], hold_steps=1
)
SHOWN = ["state", "proprio", "image", "dict"]


def vector(observations: str = "state") -> GymnasiumVector:
    return GymnasiumVector(make_point(POINT, N, render_final=True), observations)


def sb3(observations: str = "state") -> StableBaselinesVec:
    return StableBaselinesVec(make_point(POINT, N, render_final=True), observations)


@pytest.mark.parametrize("observations", SHOWN)
def test_what_is_shown_lies_in_gymnasiums_spaces_and_repeats_with_the_seed(observations: str) -> None:
    env = vector(observations)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as which Gymnasium's check tells what it finds
        check_space_limit(env.single_action_space, "action")
    env.action_space.seed(0)
    actions, runs = [env.action_space.sample() for _ in range(8)], []
    for _ in range(2):
        seen, info = env.reset(seed=7)
        runs.append([seen, *(env.step(action) for action in actions)])
        assert info == {}
    assert data_equivalence(runs[0], runs[1], exact=True)
    for seen in (runs[0][0], *(step[0] for step in runs[0][1:])):
        assert seen in env.observation_space
    assert all(step[1].dtype == np.float32 and step[2].dtype == bool for step in runs[0][1:])


def test_an_ended_row_is_reset_in_the_same_step_and_its_last_observation_is_in_info() -> None:
    env, alone = vector(), make_point(POINT, N)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    env.reset(seed=1)
    alone.reset([1, 2, 3])
    ended = 0
    for _ in range(6):
        action = np.zeros((N, 2), np.float32)
        seen, _, terminated, truncated, info = env.step(action)
        result = alone.step_chunk(torch.zeros(N, 1, 2))  # rows that end freeze in their last state
        for row in np.flatnonzero(terminated | truncated):
            last = result.final_observation.rows([result.final_rows.index(row)]).privileged[0, :-2].numpy()
            assert np.array_equal(info["final_obs"][row], last)
            assert not np.array_equal(seen[row], last)
            assert info["_final_info"][row]
            assert (
                info["final_info"]["episode"]["l"][row]
                == result.episodes[result.final_rows.index(row)].metrics["episode_len"]
            )
            ended += 1
    assert ended == N


def test_rows_of_a_mask_are_reset_and_others_go_on() -> None:
    env = vector()
    before, _ = env.reset(seed=1)
    after, _ = env.reset(seed=[11, 12, 13], options={"reset_mask": np.array([False, True, False])})
    assert [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True, False]
    with pytest.raises(ConfigError, match="seed has 2 entries for 3 rows"):
        env.reset(seed=[1, 2])


def test_gymnasiums_vector_wrappers_take_it() -> None:
    env = RecordEpisodeStatistics(vector())
    env.reset(seed=0)
    returns = [env.step(np.zeros((N, 2), np.float32))[-1] for _ in range(6)]
    assert any("episode" in info for info in returns)
    env.close()


def test_another_chunk_or_a_missing_camera_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.chunk is 2"):
        GymnasiumVector(make_point(EnvConfig(chunk=2, horizon=6, hold_steps=1, cameras=["a"]), N))
    with pytest.raises(ConfigError, match=r"observations is 'image', but env\.cameras is \[\]"):
        GymnasiumVector(make_point(EnvConfig(chunk=1, horizon=6, hold_steps=1, cameras=[]), N), "image")
    with pytest.raises(ConfigError, match="observations is 'states'"):
        vector("states")


@pytest.mark.parametrize("observations", SHOWN)
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


def test_sb3_is_told_of_time_limits_and_last_observations() -> None:
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


def test_sb3s_normaliser_and_ppo_take_a_gymnasium_env_with_discrete_actions() -> None:
    section = compose_train(["env=gymnasium", "policy=state", "env.id=CartPole-v1", "env.horizon=500"]).env
    env = VecNormalize(StableBaselinesVec(make_gymnasium(section, 4), "proprio"))
    model = PPO("MlpPolicy", env, n_steps=16, batch_size=32, n_epochs=1, seed=0).learn(128)
    assert model.num_timesteps == 128


@pytest.mark.sim
def test_sb3s_ppo_trains_on_batched_maniskill() -> None:
    from envs.adapters import make_sb3

    env = make_sb3("PickCube-v1", num_envs=4, horizon=10, control_mode="pd_joint_delta_pos")
    model = PPO("MlpPolicy", env, n_steps=12, batch_size=24, n_epochs=1, seed=0).learn(96)
    assert "batched" in env.get_attr("spec")[0].backend
    assert [info["l"] for info in model.ep_info_buffer] == [10] * 4 * 2
    env.close()


@pytest.mark.sim
def test_a_maniskill_task_is_a_gymnasium_vector_env() -> None:
    from envs.adapters import make_vector

    env = make_vector("PickCube-v1", num_envs=2, horizon=10)
    seen, _ = env.reset(seed=0)
    assert seen in env.observation_space
    assert env.step(env.action_space.sample())[0] in env.observation_space
    with pytest.raises(ConfigError, match="obs_mode is no setting"):
        make_vector("PickCube-v1", num_envs=2, obs_mode="state")
    env.close()
