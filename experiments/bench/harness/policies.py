"""An untrained policy and random inputs of an env like PickCube's, for measurements that need no simulator."""

from __future__ import annotations

import torch

from policies.tiny_vla import TinyVLA
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.interfaces.envs import EnvSpec, Observation

ACTION_DIM, PROPRIO_DIM, PRIVILEGED_DIM = 7, 19, 44


def untrained(config: TrainConfig, rows: int) -> TinyVLA:
    """Returns a policy of the config's sizes for `rows` env rows, on the CPU."""
    env, dims = config.env, (ACTION_DIM, PROPRIO_DIM, PRIVILEGED_DIM)
    spec = EnvSpec(env.task, rows, env.chunk, env.horizon, *dims, env.obs_size, tuple(env.cameras), "none")
    return TinyVLA(config.policy, spec, seed=0)


def observed(config: TrainConfig, rows: int, draw: torch.Generator) -> Observation:
    """Returns random pictures, uint8 [rows, cameras, S, S, 3], and states, float32 [rows, PROPRIO_DIM]."""
    env = config.env
    shape = (rows, len(env.cameras), env.obs_size, env.obs_size, 3)
    pictures = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
    return Observation(torch.randn(rows, PROPRIO_DIM, generator=draw), ("pick up the cube",) * rows, pictures)
