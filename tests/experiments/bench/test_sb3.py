"""Stable-Baselines3's PPO and what it is compared with are given the same work, and both do all of it."""

from __future__ import annotations

import inspect
from dataclasses import replace

from stable_baselines3 import PPO, SAC

from experiments.bench import sb3
from experiments.bench.harness import Run
from policies.actor_critic import ActorCriticOptions
from policies.soft_actor import SoftActorOptions


def test_our_settings_are_sb3s_defaults() -> None:
    theirs = {name: p.default for name, p in inspect.signature(PPO.__init__).parameters.items()}
    config = sb3.our_config("mujoco", sb3.CASES["mujoco"], compile=True)
    ours = config.algorithm
    steps = config.env.num_envs * config.env.chunks_per_rollout
    assert theirs["n_steps"] == sb3.CASES["mujoco"].steps == steps
    assert theirs["batch_size"] == sb3.MINIBATCH == steps // ours.num_minibatches
    assert theirs["n_epochs"] == ours.epochs
    assert ours.one_optimizer
    assert (theirs["learning_rate"], theirs["max_grad_norm"]) == (ours.lr, ours.max_grad_norm)
    assert (theirs["gamma"], theirs["gae_lambda"], theirs["clip_range"]) == (ours.gamma, ours.gae_lambda, ours.clip_low)
    assert (theirs["ent_coef"], theirs["target_kl"]) == (ours.entropy_coef, ours.target_kl)
    assert (ours.lr_end_fraction, ours.clip_high, config.env.chunk) == (1.0, ours.clip_low, 1)
    assert (ActorCriticOptions().hidden_size, ActorCriticOptions().num_layers) == (64, 2)  # SB3's MlpPolicy


def test_our_sac_has_sb3s_defaults() -> None:
    theirs = {name: p.default for name, p in inspect.signature(SAC.__init__).parameters.items()}
    config = sb3.our_config("sac", sb3.CASES["sac"], compile=True)
    ours = config.algorithm
    assert (theirs["batch_size"], theirs["tau"], theirs["gamma"]) == (ours.batch_size, ours.tau, ours.gamma)
    assert theirs["learning_rate"] == ours.lr == ours.value_lr
    assert ours.schedule(config.env).updates == sb3.CASES["sac"].steps
    assert ours.schedule(config.env).first_update == sb3.WARM_UP
    assert (ours.critic_hidden_size, ours.critic_layers, SoftActorOptions().hidden_size) == (256, 2, 256)


def test_both_arms_of_mujoco_do_all_of_the_work(monkeypatch) -> None:
    short = replace(sb3.CASES["mujoco"], task="Pendulum-v1", num_envs=2, steps=128)
    monkeypatch.setitem(sb3.CASES, "mujoco", short)
    options = sb3.Options(cases="mujoco", rounds=2, iterations=1, compile=False)  # array types are checked, uncompiled
    report = sb3.measure(Run(options, [], {}))
    speed = report.content["env_steps_per_s"]["mujoco"]
    assert set(speed) == {"ours", "sb3"}
    assert all(spread.count == 2 and spread.low > 0 for spread in speed.values())
    assert "mujoco: Pendulum-v1, 2 rows" in report.text
    assert "mujoco: ours / sb3" in report.text
