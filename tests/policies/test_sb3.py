"""Policies that Stable-Baselines3 saved, evaluated here: its own numbers, and what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.vec_env import VecNormalize

from envs.point_reach import make_env
from envs.sb3 import StableBaselinesVec
from policies.sb3 import StableBaselinesPolicy
from rlinf_embodied.compose import compose_evaluate
from rlinf_embodied.config import EnvConfig, Reward
from rlinf_embodied.embodied.evaluate import evaluate_command
from rlinf_embodied.errors import CheckpointError, ConfigError
from tests.observations import observed

POINT = EnvConfig(
    task="PointReach-v0", chunk=1, horizon=6, cameras=[], hold_steps=0, reward=Reward.dense, success_bonus=0.0
)
ON_POINT = ["env=point_reach", "env.chunk=1", "env.horizon=6", "env.cameras=[]", "cluster=serial"]
SEEN = observed(torch.tensor([[0.1, 0.2, -0.4, 0.5], [0.3, 0.1, 0.0, 0.9]]), ("", ""), None, torch.ones(2, 8))


def rows() -> StableBaselinesVec:
    return StableBaselinesVec(make_env(POINT, 4), "proprio")


def read(path: Path) -> StableBaselinesPolicy:
    return StableBaselinesPolicy.from_folder(path)


def chosen(policy: StableBaselinesPolicy) -> np.ndarray:
    return policy.act(policy.encode(SEEN), None, 1.0).actions[:, 0].numpy()


@pytest.mark.parametrize("kind", [PPO, SAC])
def test_actions_are_those_of_the_model_that_was_saved(tmp_path: Path, kind: type) -> None:
    model = kind("MlpPolicy", rows(), seed=1)
    model.save(tmp_path / "model.zip")
    expected, _ = model.predict(SEEN.proprio.numpy(), deterministic=True)
    assert np.allclose(chosen(read(tmp_path / "model.zip")), expected, atol=1e-6)


def test_statistics_beside_the_file_are_used(tmp_path: Path) -> None:
    env = VecNormalize(rows())
    model = PPO("MlpPolicy", env, n_steps=8, batch_size=32, n_epochs=1, seed=1).learn(32)
    model.save(tmp_path / "model.zip")
    plain = chosen(read(tmp_path / "model.zip"))
    env.save(str(tmp_path / "vecnormalize.pkl"))
    expected, _ = model.predict(env.normalize_obs(SEEN.proprio.numpy()), deterministic=True)
    assert np.allclose(chosen(read(tmp_path / "model.zip")), expected, atol=1e-6)
    assert not np.allclose(plain, expected)
    (tmp_path / "vecnormalize.pkl").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"vecnormalize\.pkl cannot be read"):
        read(tmp_path / "model.zip")


class Sizes:
    """Just enough of an env for SB3 to build a model."""

    def __init__(self, model: type, actions: spaces.Space, tmp_path: Path) -> None:
        import gymnasium

        class Nothing(gymnasium.Env):
            observation_space, action_space = spaces.Box(-1, 1, (4,), np.float32), actions

        self.model = model("MlpPolicy", Nothing(), seed=1)
        self.model.save(tmp_path / "model.zip")


def test_other_bounds_are_mapped_to_ours(tmp_path: Path) -> None:
    model = Sizes(PPO, spaces.Box(0.0, 4.0, (2,), np.float32), tmp_path).model
    theirs, _ = model.predict(SEEN.proprio.numpy(), deterministic=True)
    assert np.allclose(chosen(read(tmp_path / "model.zip")), theirs / 2 - 1, atol=1e-6)


def test_a_discrete_choice_is_the_largest_entry(tmp_path: Path) -> None:
    model = Sizes(DQN, spaces.Discrete(3), tmp_path).model
    theirs, _ = model.predict(SEEN.proprio.numpy(), deterministic=True)
    assert chosen(read(tmp_path / "model.zip")).argmax(1).tolist() == theirs.tolist()


def test_an_evaluation_gives_sb3s_own_returns(tmp_path: Path) -> None:
    model = PPO("MlpPolicy", rows(), seed=1)
    model.save(tmp_path / "model.zip")
    env = rows()
    env.seed(9000)
    seen, returns = env.reset(), np.zeros(4)
    for _ in range(6):
        seen, rewards, *_ = env.step(model.predict(seen, deterministic=True)[0])
        returns += rewards
    asked = ["policy=sb3", f"checkpoint={tmp_path / 'model.zip'}", "eval.num_episodes=4", "eval.record_video=false"]
    evaluate_command(compose_evaluate([*ON_POINT, *asked, f"run.dir={tmp_path / 'out'}"]))
    found = json.loads((tmp_path / "out/eval_info.json").read_text())
    assert [episode["return"] for episode in found["episodes"]] == pytest.approx(returns.tolist(), abs=1e-4)


def test_an_observation_that_the_env_does_not_show_is_named(tmp_path: Path) -> None:
    PPO("MlpPolicy", rows(), seed=1).save(tmp_path / "model.zip")
    other = observed(torch.zeros(2, 3), ("", ""), None, torch.zeros(2, 8))
    with pytest.raises(CheckpointError, match=r"sees an observation of shape \[4\], but the env shows .*\[3\]"):
        read(tmp_path / "model.zip").encode(other)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint=none.zip"], "policy=sb3 reads a file and there is none"),
        ([], "checkpoint is None"),
        (["checkpoint=none.zip", "env.chunk=2"], "env.chunk is 2"),
        (["checkpoint=none.zip", "eval.greedy=false"], "eval.greedy is False"),
        (["checkpoint=none.zip", "eval.sampled_episodes=2"], "eval.sampled_episodes is 2"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_the_key_to_change(overrides: list[str], message: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        evaluate_command(compose_evaluate([*ON_POINT, "policy=sb3", *overrides]))


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.zip").write_text("text")
    with pytest.raises(CheckpointError, match=r"give a file that model\.save"):
        read(tmp_path / "model.zip")
