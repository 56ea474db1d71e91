"""Stable-Baselines3's PPO and what it is compared with are given the same work, and both do all of it."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from stable_baselines3 import PPO

from experiments.bench import sb3
from experiments.bench.harness import Run
from policies.actor_critic import ActorCriticOptions


def test_our_settings_are_sb3s_defaults() -> None:
    theirs = {name: p.default for name, p in inspect.signature(PPO.__init__).parameters.items()}
    config = sb3.our_config("HalfCheetah-v5", 8, compile=True)
    ours = config.algorithm
    assert theirs["n_steps"] == sb3.STEPS == config.env.num_envs * config.env.chunks_per_rollout
    assert theirs["batch_size"] == sb3.MINIBATCH == sb3.STEPS // ours.num_minibatches
    assert theirs["n_epochs"] == ours.epochs == ours.value_epochs
    assert (theirs["learning_rate"], theirs["max_grad_norm"]) == (ours.lr, ours.max_grad_norm)
    assert (theirs["gamma"], theirs["gae_lambda"], theirs["clip_range"]) == (ours.gamma, ours.gae_lambda, ours.clip_low)
    assert (theirs["ent_coef"], theirs["target_kl"]) == (ours.entropy_coef, ours.target_kl)
    assert (ours.lr_end_fraction, ours.clip_high, config.env.chunk) == (1.0, ours.clip_low, 1)
    assert (ActorCriticOptions().hidden_size, ActorCriticOptions().num_layers) == (64, 2)  # SB3's MlpPolicy


def test_both_arms_of_mujoco_do_all_of_the_work(monkeypatch) -> None:
    monkeypatch.setattr(sb3, "STEPS", 128)
    monkeypatch.setitem(sb3.CASES, "mujoco", replace(sb3.CASES["mujoco"], iteration=128))
    plain = {"compile": False}  # what checks array types in tests cannot be compiled
    options = sb3.Options(cases="mujoco", rounds=2, iterations=1, task="Pendulum-v1", num_envs=2, clock="wall", **plain)
    report = sb3.measure(Run(options, [], {}))
    speed = report.content["env_steps_per_s"]["mujoco"]
    assert set(speed) == {"ours", "sb3"}
    assert all(spread.count == 2 and spread.low > 0 for spread in speed.values())
    assert "mujoco: Pendulum-v1, 2 rows" in report.text
    assert "mujoco: ours / sb3" in report.text


@pytest.mark.sim
@pytest.mark.parametrize("size", [None, 16], ids=["state", "images"])
def test_both_arms_of_maniskill_show_as_much_and_take_the_same_actions(size) -> None:
    envs = [make("PickCube-v1", 1, size) for make in (sb3.stock, sb3.batched)]
    assert envs[0].action_space == envs[1].action_space
    sizes = []
    for env in envs:
        parts = env.observation_space.spaces if size else {"state": env.observation_space}
        sizes.append(sorted((space.shape for space in parts.values()), key=len))
        env.close()
    assert [shapes[1:] for shapes in sizes] == ([[(16, 16, 3)]] * 2 if size else [[], []])
    assert sizes[0][0][0] == pytest.approx(sizes[1][0][0], abs=15)  # the state, and what is there of the robot's own
