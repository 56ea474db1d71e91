"""Episodes of one env object do not influence each other, at whatever moment the earlier ones ended."""

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

    torch.set_num_threads(1)
    env = make_env(EnvConfig(cameras=[]), NUM_ENVS)
    first, again = clumsy_rollout(env), clumsy_rollout(env)
    env.close()
    differing = (first != again).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert differing == [], f"rows {differing} took another course the second time"
