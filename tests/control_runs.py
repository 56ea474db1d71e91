"""Small runs of learning from transitions: a walk on a line that ends, networks of a few hundred parameters."""

from __future__ import annotations

from pathlib import Path

from runs import fresh

from rlinf_embodied.algorithms.algorithm import Algorithm, Training
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import AlgorithmConfig, PolicyConfig, TrainConfig
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.learning.reduce import Reducer
from rlinf_embodied.runtime.host import solo_context

SMALL = {
    "env": "gymnasium",
    "policy": "soft_actor",
    "algorithm": "sac",
    "env.id": "Pendulum-v1",
    "env.horizon": 12,  # rollouts cut episodes
    "env.num_envs": 8,
    "env.block_size": 2,
    "env.chunks_per_rollout": 5,
    "cluster": "serial",
    "policy.options.hidden_size": 16,
    "algorithm.critic_hidden_size": 16,
    "algorithm.batch_size": 16,
    "algorithm.capacity": 120,  # transitions are overwritten
    "algorithm.warmup_steps": 40,
    "algorithm.updates_per_step": 0.1,
    "run.seed": 3,
    "run.num_iterations": 4,
    "eval.num_episodes": 4,
    "eval.num_envs": 4,
    "eval.record_video": "false",
    "checkpoint.every": 2,
}
REACH = {"env": "point_reach", "env.id": None, "env.cameras": "[]", "env.horizon": 10}  # which has an expert
RLPD = [
    *("algorithm=rlpd", "algorithm.expert_steps=80", "algorithm.num_critics=3", "algorithm.policy_period=2"),
    "algorithm.updates_per_step=0.1",
]
HG_DAGGER = ["algorithm=hg_dagger", "algorithm.expert_steps=40", "algorithm.warmup_steps=0"]
RECAP = [
    *("algorithm=recap", "policy=tiny_vla", "algorithm.expert_steps=40", "algorithm.warmup_steps=0", "env.horizon=5"),
    *("env.cameras=[base_camera]", "env.obs_size=16", "warm_start.from_scratch=true", "policy.critic=observation"),
    *(f"policy.options.{o}" for o in ("num_layers=1", "num_heads=2", "stem_width=16", "keypoints=4", "num_bins=9")),
]
DAGGER = ["algorithm=dagger", "algorithm.expert_steps=40", "algorithm.warmup_steps=0"]


def reach(*overrides: str) -> TrainConfig:
    """Returns the config of a small run where there is a scripted expert."""
    return small(*(f"{key}={value}" for key, value in REACH.items()), *overrides)


def recorded(algorithm: str, folder: Path, *overrides: str) -> TrainConfig:
    """Returns the config of a small run that learns from the transitions of another one on Pendulum."""
    words = [f"algorithm={algorithm}", f"data={folder}/checkpoints/latest", "algorithm.updates_per_iteration=4"]
    return small("algorithm.updates_per_step=0.1", *words, *overrides)


def small(*overrides: str) -> TrainConfig:
    """Returns the config of a run that takes about a second; each key is given once, so `overrides` win."""
    given = SMALL | dict(text.split("=", 1) for text in overrides)
    if given["algorithm"] in ("bc", "dagger", "hg_dagger", "recap"):  # which have no critics
        given["algorithm.critic_hidden_size"] = "None"
    return fresh(compose_train, (f"{key}={value}" for key, value in given.items() if value != "None"))


def learning(kind: type[Algorithm], policy: object, algorithm: AlgorithmConfig, num_blocks: int = 1, seed: int = 5):
    """Returns an algorithm as the learner stage makes it, alone with its blocks."""
    return kind(
        Training(
            algorithm=algorithm,
            policy=policy,
            settings=PolicyConfig(),
            seed=seed,
            block_size=1,
            num_iterations=1,
            exact=True,
            reducer=Reducer(SoloGroup(), (0,) * num_blocks),
            context=solo_context(range(num_blocks)),
            copy=lambda: policy,
        )
    )
