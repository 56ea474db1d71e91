"""Episodes of one env object do not influence each other, at whatever moment the earlier ones ended."""

import gc
import weakref

import numpy as np
import pytest
import torch

from rlinf_embodied.config import EnvConfig
from rlinf_embodied.interfaces.envs import VectorEnv
from rlinf_embodied.randomness import normal

pytestmark = pytest.mark.sim
NUM_ENVS, CHUNKS = 24, 4
SEEDS = range(2**30, 2**30 + NUM_ENVS)


def clumsy_rollout(env: VectorEnv) -> torch.Tensor:
    """Privileged states [N, H * C, Q]; the expert's hand is pushed about: it hits, lifts and drops cubes."""

    def act(step: int) -> torch.Tensor:
        actions = env.expert_actions()
        actions[:, :3] += 0.3 * torch.from_numpy(normal(0, "push", np.arange(NUM_ENVS), step, shape=(3,)))
        return actions.clamp(-1.0, 1.0)

    env.reset(SEEDS)
    chunks = [env.step_chunk(lambda k, h=h: act(h * env.spec.chunk + k)) for h in range(CHUNKS)]
    return torch.cat([chunk.privileged for chunk in chunks], 1)


def test_an_episode_does_not_depend_on_what_was_hit_or_carried_before_it():
    from envs.maniskill import make_env

    env = make_env(EnvConfig(cameras=[]), NUM_ENVS)
    first, again = clumsy_rollout(env), clumsy_rollout(env)
    env.close()
    differing = (first != again).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert differing == [], f"rows {differing} took another course the second time"


def test_no_scene_outlives_the_next_reset_of_its_row(monkeypatch):
    from envs.batched import physics
    from envs.maniskill import make_env

    made, recreated_scene = [], physics.recreated_scene

    def watched(*arguments):
        scene = recreated_scene(*arguments)
        made.append(weakref.ref(scene))
        return scene

    monkeypatch.setattr(physics, "recreated_scene", watched)
    env = make_env(EnvConfig(obs_size=16), 3)
    for seed, rows in enumerate([[0, 1, 2], [1], [0, 2], [0, 1, 2], [2]]):  # in parts, with steps and images between
        env.reset([seed] * len(rows), rows)
        env.step_chunk(torch.zeros(3, env.spec.chunk, env.spec.action_dim))
    gc.collect()
    assert len(made) >= 10
    assert sum(reference() is not None for reference in made) == 3
    env.close()
