"""An untrained policy and random inputs of an env like PickCube's, for measurements that need no simulator."""

from __future__ import annotations

import torch

from policies.tiny_vla import TinyVLA
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.interfaces.envs import PROPRIO, EnvSpec, Observation, features_of

ACTION_DIM, PROPRIO_DIM, PRIVILEGED_DIM = 7, 19, 44


def untrained(config: TrainConfig, rows: int) -> TinyVLA:
    """Returns a policy of the config's sizes for `rows` env rows, on the CPU."""
    env = config.env
    features = features_of(
        dict.fromkeys(env.cameras, (env.obs_size, env.obs_size)), {PROPRIO: PROPRIO_DIM}, PRIVILEGED_DIM
    )
    spec = EnvSpec(env.task, rows, env.chunk, env.horizon, ACTION_DIM, features, "none")
    return TinyVLA(config.policy, spec, seed=0)


def observed(config: TrainConfig, rows: int, draw: torch.Generator) -> Observation:
    """Returns random pictures, uint8 [rows, S, S, 3] of each camera, and states, float32 [rows, PROPRIO_DIM]."""
    env = config.env
    shape = (rows, len(env.cameras), env.obs_size, env.obs_size, 3)
    pictures = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
    images = dict(zip(env.cameras, pictures.unbind(1), strict=True))
    return Observation({PROPRIO: torch.randn(rows, PROPRIO_DIM, generator=draw)}, ("pick up the cube",) * rows, images)
