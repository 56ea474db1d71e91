"""Does the instruction matter?  One policy, several scenes, and every instruction in each of them.

What a policy does is read off the object: lifted, pushed away from the robot, or pulled towards it.  Goals are neither
shown nor told in this experiment, so that in a scene where several tasks are possible only the words decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlinf_embodied.config import EnvConfig
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.evaluation import evaluation_env
from rlinf_embodied.interfaces.policies import Policy

LIFT_M, SLIDE_M = 0.04, 0.05  # how far an object must move to count
BEHAVIOURS = ("lifted", "pushed", "pulled")


@dataclass(frozen=True, slots=True)
class Row:
    """What the policy did in one scene under one instruction: share of episodes with each behaviour."""

    scene: str
    instruction: str
    episodes: int
    shares: dict[str, float]


def behaviour_table(
    policy: Policy, scenes: Sequence[EnvConfig], instructions: Sequence[str], num_episodes: int, seed: int
) -> list[Row]:
    """Returns one row per scene and instruction, greedy actions, held-out seeds.

    Args:
        policy: the policy; on the CPU.
        scenes: env sections, goals hidden or not.
        instructions: sentences, each tried in every scene.
        num_episodes: per row.
        seed: reset seed of the first episode.
    """
    rows = []
    for scene in scenes:
        env = make_env(evaluation_env(scene, num_episodes), num_episodes, "cpu")
        for instruction in instructions:
            shown = env.reset(range(seed, seed + num_episodes))
            start = _positions(env.object_positions())
            highest = start[:, 2].clone()
            for _ in range(env.spec.chunks_per_episode):
                told = replace(shown, instruction=(instruction,) * num_episodes)
                actions = policy.act(policy.encode(told), None, 1.0).actions
                shown = env.step_chunk(actions).observation
                highest = torch.maximum(highest, _positions(env.object_positions())[:, 2])
            rows.append(Row(scene.task, instruction, num_episodes, _shares(start, env.object_positions(), highest)))
        env.close()
    return rows


def _positions(positions: Tensor | None) -> Tensor:
    assert positions is not None, "the scene has no object to watch"
    return positions.clone()


def _shares(start: Tensor, end: Tensor | None, highest: Tensor) -> dict[str, float]:
    """Shares of episodes; a lifted object counts as lifted only, wherever it ends."""
    moved = _positions(end)[:, 0] - start[:, 0]
    lifted = highest - start[:, 2] > LIFT_M
    pushed, pulled = (~lifted & (moved > SLIDE_M)), (~lifted & (moved < -SLIDE_M))
    return {name: float(did.float().mean()) for name, did in zip(BEHAVIOURS, (lifted, pushed, pulled), strict=True)}
