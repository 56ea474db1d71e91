"""PPO here and that of Stable-Baselines3 are given the same work, and both do all of it."""

from __future__ import annotations

import inspect

import pytest
from stable_baselines3 import PPO

from experiments.bench import peers
from experiments.bench.harness import Run
from rlinf_embodied.errors import ConfigError


def test_our_settings_are_sb3s_defaults() -> None:
    theirs = {name: p.default for name, p in inspect.signature(PPO.__init__).parameters.items()}
    config = peers.our_config("HalfCheetah-v5", 8)
    ours = config.algorithm
    assert theirs["n_steps"] == peers.STEPS == config.env.num_envs * config.env.chunks_per_rollout
    assert theirs["batch_size"] == peers.MINIBATCH == peers.STEPS // ours.num_minibatches
    assert theirs["n_epochs"] == ours.epochs == ours.value_epochs
    assert (theirs["learning_rate"], theirs["max_grad_norm"]) == (ours.lr, ours.max_grad_norm)
    assert (theirs["gamma"], theirs["gae_lambda"], theirs["clip_range"]) == (ours.gamma, ours.gae_lambda, ours.clip_low)
    assert (theirs["ent_coef"], theirs["target_kl"]) == (ours.entropy_coef, ours.target_kl)
    assert (ours.lr_end_fraction, ours.clip_high, config.env.chunk) == (1.0, ours.clip_low, 1)
    assert (config.policy.hidden_size, config.policy.num_layers) == (64, 2)  # SB3's MlpPolicy


def test_both_arms_do_all_of_the_work(monkeypatch) -> None:
    monkeypatch.setattr(peers, "STEPS", 128)
    options = peers.Options(rounds=2, iterations=1, task="Pendulum-v1", num_envs=2, clock="wall")
    report = peers.measure(Run(options, [], {}))
    speed = report.content["env_steps_per_s"]
    assert set(speed) == {"ours", "sb3"}
    assert all(spread.count == 2 and spread.low > 0 for spread in speed.values())
    assert "Pendulum-v1, 2 rows" in report.text
    assert "ours / SB3" in report.text


@pytest.mark.parametrize(
    ("changes", "message"), [({"clock": "sun"}, "clock has 'sun'"), ({"num_envs": 3}, "num_envs is 3")]
)
def test_other_clocks_and_rows_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        peers.measure(Run(peers.Options(**changes), [], {}))
