"""Small runs of two levels of policies for tests: a point that gets its next goal from above."""

from __future__ import annotations

from placements import looped
from runs import digest, tiny

from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.graph import HIGH_ACTOR
from rlinf_embodied.execution.executor import Executor

BOTH = {
    "policy": "actor_critic",
    "env.cameras": "[]",
    "env.chunks_per_rollout": 5,  # the third decision of a rollout holds for one chunk-step only
    "hierarchy.every": 2,
    "hierarchy.frozen": "false",
    "hierarchy.columns": "[2,3]",
    "hierarchy.goal_low": "[-1,-1]",
    "hierarchy.goal_high": "[1,1]",
    "hierarchy.policy.options.hidden_size": 16,
    "hierarchy.policy.options.num_layers": 1,
    "hierarchy.algorithm.epochs": 2,
    "hierarchy.algorithm.num_minibatches": 2,
    "hierarchy.algorithm.value_epochs": 2,
}


def two_levels(*overrides: str) -> TrainConfig:
    """Returns the config of a run in which both levels learn; each key is given once, so `overrides` win."""
    given = BOTH | dict(text.split("=", 1) for text in overrides)
    return tiny(*(f"{key}={value}" for key, value in given.items() if value != "-"))


def placed(env: object, policy: object, *actors: object, shards: int = 1) -> list[dict]:
    """Returns a plan: the rollout, then the high level's learner and the low level's, where it is."""
    return looped(env, policy, shards, **dict(zip(("high_actor", "actor"), actors, strict=False)))


def digests(executor: Executor) -> tuple[str, ...]:
    """Returns the SHA-256 of each level's weights."""
    return tuple(digest(executor, stage) for stage in (HIGH_ACTOR, "actor") if stage in executor.workflow.stages)
