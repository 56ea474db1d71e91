"""The warm start: the policy that RL starts from, made once and cached; docs/warm_start.md tells the ways to one."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rlinf_embodied import portable
from rlinf_embodied.cache import cache_root, writable_place
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import EnvConfig, TrainConfig
from rlinf_embodied.embodied.new_policy_stage import NewPolicyStage
from rlinf_embodied.embodied.warm_start_source import source_of
from rlinf_embodied.embodied.warm_start_stage import NUM_DATA_BLOCKS, WarmStartStage, WarmStartStageConfig
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.flow.graph import StageSpec, Workflow
from rlinf_embodied.flow.plan import resolve
from rlinf_embodied.interfaces import OBSERVATION_VERSION
from rlinf_embodied.learning.checkpoint import write_whole
from rlinf_embodied.runtime.host import Tick
from rlinf_embodied.runtime.session import Session, of_type
from rlinf_embodied.telemetry.run_folder import library_versions

_LOG = logging.getLogger(__name__)
_VERSION = 1  # of what a cached checkpoint depends on beside its key
_PLACES = ("cache_dir", "checkpoint", "demonstrations", "teacher")  # where files lie; what is in them counts
# of the env's section, how it is trained in
_SCALE = ("num_envs", "block_size", "chunks_per_rollout", "auto_reset", "carry_over")
_REWARD = ("hold_steps", "reward", "success_bonus")
PLAN = [{"tree": {"leaf": {"stage": "warm_start", "devices": "all"}}}]


def cache_folder(config: WarmStartStageConfig, exact_cpu: bool) -> Path:
    """Returns where the clone of this configuration is cached: keyed by all that it is a function of."""
    root = cache_root(config.warm_start.cache_dir)
    libraries = ("torch", "mani_skill", "sapien", "transformers")
    key = {
        "version": _VERSION,
        "observations": OBSERVATION_VERSION,
        "envs": [_relevant(env) for env in config.envs],
        "policy": {k: v for k, v in asdict(config.policy).items() if k != "temperature"},
        "warm_start": {k: v for k, v in asdict(config.warm_start).items() if k not in _PLACES},
        "source": config.source and (config.source.kind, config.source.digest),
        "seed": config.seed,
        "cpu": exact_cpu,
        "portable": portable.is_pinned(),
        "libraries": {k: v for k, v in library_versions().items() if k in libraries},
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return root / "warm_start" / f"{config.envs[0].task}-{digest}"


def _relevant(env: EnvConfig) -> dict[str, object]:
    return {name: value for name, value in asdict(env).items() if name not in (*_SCALE, *_REWARD)}


def starting_policy(
    config: TrainConfig,
    session: Session,
    cluster: Cluster,
    progress: Callable[[str, int, int, str], None],
    spare: Path | None = None,
) -> Path:
    """Returns the checkpoint that a training starts from: the given one, a clone, or a new policy.

    What is made is kept in the cache; below `spare` where that cannot be written.
    """
    if config.warm_start.checkpoint is not None:
        return Path(config.warm_start.checkpoint)
    stage = WarmStartStageConfig(
        (config.env,), config.policy, config.warm_start, config.run.seed, source_of(config.warm_start)
    )
    if config.warm_start.from_nothing:
        return new_policy(stage, session, cluster, spare)
    return warm_start(stage, session, cluster, progress, spare)


def new_policy(config: WarmStartStageConfig, session: Session, cluster: Cluster, spare: Path | None = None) -> Path:
    """Returns the folder of a policy that has learned nothing; what it standardises its inputs with is measured."""
    folder = writable_place(cache_folder(config, cluster.kind == "cpu"), spare)
    if (folder / "config.json").exists():
        return folder
    stage = StageSpec("warm_start", f"{NewPolicyStage.__module__}.NewPolicyStage", config)
    workflow = Workflow("new policy", 1, {"warm_start": stage})
    executor = Executor(workflow, resolve("new policy", PLAN, 1, workflow), session, cluster)
    write_whole(folder, lambda partial: executor.call("warm_start", "save", Tick(0), str(partial)))
    return folder


def warm_start(
    config: WarmStartStageConfig,
    session: Session,
    cluster: Cluster,
    progress: Callable[[str, int, int, str], None],
    spare: Path | None = None,
) -> Path:
    """Returns the folder of the cloned policy, made now or found in the cache.

    Args:
        config: envs, policy, cloning settings and seed.
        session: where the work runs.
        cluster: its devices; up to NUM_DATA_BLOCKS of them are used.
        progress: called with (what, done, total, remark).
        spare: the clone goes below it where the cache cannot be written.

    Raises:
        ConfigError: the cache cannot be written, and there is no `spare`.
    """
    folder = writable_place(cache_folder(config, cluster.kind == "cpu"), spare)
    if (folder / "config.json").exists():
        _LOG.info("warm start: cached clone in %s", folder)
        return folder
    stage = StageSpec("warm_start", f"{WarmStartStage.__module__}.WarmStartStage", config, collective=True)
    workflow = Workflow("warm start", NUM_DATA_BLOCKS, {"warm_start": stage})
    devices = min(cluster.num_devices, NUM_DATA_BLOCKS)
    executor = Executor(workflow, resolve("warm start", PLAN, devices, workflow), session, cluster)
    total = sum(len(config.demonstrations(block)) for block in range(NUM_DATA_BLOCKS))
    rounds = max(of_type(executor.facts["warm_start"], int))
    done = solved = 0
    for number in range(rounds):
        answers = of_type(executor.call("warm_start", "collect", Tick(number)), dict)
        done += sum(answer["episodes"] for answer in answers)
        solved += sum(answer["solved"] for answer in answers)
        progress("demonstrations", done, total, f"{solved} solved")
    if config.source is not None and solved < total:
        _LOG.warning("%d of %d episodes of %s do not solve the task here", total - solved, total, config.source.path)
    executor.call("warm_start", "prepare", Tick(0))
    for whole, epochs in ((True, config.warm_start.epochs), (False, config.warm_start.head_epochs)):
        executor.call("warm_start", "begin_phase", Tick(0), whole)
        for epoch in range(epochs):
            loss = executor.call("warm_start", "fit_epoch", Tick(epoch))[0]
            progress("cloning" if whole else "cloning the head", epoch + 1, epochs, f"loss {loss:.3f}")
    write_whole(folder, lambda partial: executor.call("warm_start", "save", Tick(0), str(partial)))
    return folder
