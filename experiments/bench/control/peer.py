"""Stable-Baselines3's SAC with the settings of one of our configs."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from experiments.bench.control.curves import Curve, learned
from experiments.bench.harness import Worker
from rlinf_embodied.config import SACConfig, TrainConfig

if TYPE_CHECKING:
    from stable_baselines3 import SAC


class StableBaselines:
    """Trains it."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def learn(self, seed: int, points: int) -> Curve:
        """Trains with one seed and returns its curve; evaluations are not part of its time."""
        from stable_baselines3.common.env_util import make_vec_env
        from stable_baselines3.common.evaluation import evaluate_policy

        config = self._config
        model, total = (
            soft_actor_critic(config, seed),
            config.run.num_iterations * steps_per_iteration(config),
        )
        held = make_vec_env(_make(config), 1, seed=config.eval.seed)
        ask = lambda: (float(cast(float, evaluate_policy(model, held, config.eval.num_episodes)[0])), None)  # noqa: E731
        return learned(model, seed, total, points, ask, time.perf_counter)


def steps_per_iteration(config: TrainConfig) -> int:
    """Returns the env steps of an iteration over all rows."""
    return config.env.num_envs * config.env.chunks_per_rollout


def soft_actor_critic(config: TrainConfig, seed: int) -> SAC:
    """Returns their algorithm, which gathers as many env steps as ours and then makes as many updates."""
    from stable_baselines3 import SAC
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv

    env, algorithm = config.env, cast(SACConfig, config.algorithm)
    return SAC(
        "MlpPolicy",
        make_vec_env(_make(config), env.num_envs, seed=seed, vec_env_cls=DummyVecEnv),
        learning_rate=algorithm.lr,
        buffer_size=algorithm.capacity,
        learning_starts=algorithm.typical_iteration(env) * steps_per_iteration(config),
        batch_size=algorithm.batch_size,
        tau=algorithm.tau,
        gamma=algorithm.gamma,
        train_freq=env.chunks_per_rollout,
        gradient_steps=algorithm.schedule(env).updates,
        policy_kwargs={"net_arch": [algorithm.critic_hidden_size] * algorithm.critic_layers},
        seed=seed,
        device="cpu",
    )


def _make(config: TrainConfig) -> Any:
    import gymnasium

    return partial(gymnasium.make, config.env.task, max_episode_steps=config.env.horizon)


def peers(config: TrainConfig, seed: int, points: int) -> Curve:
    """Trains the peer with one seed, in a separate process."""
    worker = Worker(StableBaselines, config)
    try:
        return cast(Curve, worker.ask("learn", seed, points).answer())
    finally:
        worker.close()
