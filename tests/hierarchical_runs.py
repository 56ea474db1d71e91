"""Small runs of two levels of policies for tests: a point that gets its next goal from above."""

from __future__ import annotations

from pathlib import Path

from placements import looped
from runs import cluster, tiny

from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.graph import HIGH_ACTOR
from rlinf_embodied.embodied.warm_start import starting_high_level, starting_policy
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession, Session

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


def folders(config: TrainConfig) -> tuple[Path, Path]:
    """Returns what both policies start from, made now or found in the cache."""
    session, one = SerialSession(), cluster(1)
    low = starting_policy(config, session, one, lambda *progress: None)
    return low, starting_high_level(config, session, one)


def executor_for(config: TrainConfig, plan: list[dict], devices: int, session: Session) -> Executor:
    """Returns the training workflow of `config` under a plan."""
    workflow = training_workflow(config, *map(str, folders(config)))
    return Executor(workflow, resolve("test", plan, devices, workflow), session, cluster(devices))


def placed(env: object, policy: object, *actors: object, shards: int = 1) -> list[dict]:
    """Returns a plan: the rollout, then the high level's learner and the low level's, where it is."""
    return looped(env, policy, shards, **dict(zip(("high_actor", "actor"), actors, strict=False)))


def digests(executor: Executor) -> tuple[str, ...]:
    """Returns the SHA-256 of each learner's weights; all workers of one must have the same."""
    found = []
    for stage in (HIGH_ACTOR, "actor"):
        if stage in executor.workflow.stages:
            (digest,) = set(executor.call(stage, "weights_digest", StepContext(0)))
            found.append(str(digest))
    return tuple(found)
