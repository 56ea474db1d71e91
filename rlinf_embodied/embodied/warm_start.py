"""The warm start: the policy that RL starts from, made once and cached; docs/warm_start.md tells the ways to one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import EnvConfig, TrainConfig
from rlinf_embodied.embodied.new_policy_stage import NewPolicyStage
from rlinf_embodied.embodied.policy_folder import is_published
from rlinf_embodied.embodied.warm_start_source import source_of
from rlinf_embodied.embodied.warm_start_stage import NUM_DATA_BLOCKS, WarmStartStage, WarmStartStageConfig
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.interfaces.envs import OBSERVATION_VERSION
from rlinf_embodied.plug_ins import source_digest, targets_of
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session, of_type
from rlinf_embodied.training import warm_start as common
from rlinf_embodied.workflow.graph import StageSpec

_LOG = logging.getLogger(__name__)
_VERSION = 1  # of what a cached checkpoint depends on in addition to its key
_STAGE = "warm_start"
_PLACES = ("cache_dir", "checkpoint", "demonstrations", "teacher")  # where files lie; what is in them counts
# of the env's section, how it is trained in
_SCALE = ("num_envs", "block_size", "chunks_per_rollout", "auto_reset", "carry_over")
_REWARD = ("hold_steps", "reward", "success_bonus")
_SPEED = ("control_hz", "rows_per_call")
_NOTHING: Mapping[str, object] = {}


def cache_folder(config: WarmStartStageConfig, kind: str, more: Mapping[str, object] = _NOTHING) -> Path:
    """Returns where the clone of this configuration is cached: keyed by all that it is a function of, `more` included.

    `kind` is torch's name of the devices: on other kinds than "cpu" bits differ, on some the simulation too.
    """
    key = {
        "version": _VERSION,
        "observations": OBSERVATION_VERSION,
        "envs": [_relevant(env) for env in config.envs],
        "policy": {k: v for k, v in asdict(config.policy).items() if k != "temperature" and v != {}},
        "warm_start": {k: v for k, v in asdict(config.warm_start).items() if k not in _PLACES},
        "source": config.source and (config.source.kind, config.source.digest),
        "seed": config.seed,
        "cpu": kind == "cpu",
        **({"backend": "physx_cuda"} if any(env.runs_on_gpu(kind) for env in config.envs) else {}),
        **_own_code(config),
        **_published(config),
        **more,
    }
    libraries = ("torch", "mani_skill", "sapien", "transformers")
    return common.cache_folder(config.warm_start.cache_dir, config.envs[0].task, key, libraries)


def _published(config: WarmStartStageConfig) -> dict[str, object]:
    """Returns names, sizes and times of the files of a published folder, whose bytes are many."""
    given = config.warm_start.checkpoint
    if given is None:
        return {}
    files = sorted(path for path in Path(given).iterdir() if path.is_file())
    return {"published": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]}


def _own_code(config: WarmStartStageConfig) -> dict[str, object]:
    """Returns a digest of the code of a custom env, adapter and policy: where it is edited, training starts anew."""
    found = targets_of([asdict(config.policy), *(asdict(env) for env in config.envs)])
    own = sorted({target for target in found if not target.startswith(("policies.", "envs."))})
    return {"code": source_digest(own)} if own else {}


def _relevant(env: EnvConfig) -> dict[str, object]:
    return {name: value for name, value in asdict(env).items() if name not in (*_SCALE, *_REWARD, *_SPEED)}


def starting_policy(
    config: TrainConfig,
    session: Session,
    cluster: Cluster,
    progress: ShowProgress,
    spare: Path | None = None,
) -> Path:
    """Returns the checkpoint that a training starts from: the given one, a clone, or a new policy.

    A published folder is made one of this project first, which says what it acts in.  What is made is kept in the
    cache; below `spare` where that cannot be written.
    """
    given = config.warm_start.checkpoint
    published = given is not None and is_published(given, config.policy)
    if given is not None and not published:
        return Path(given)
    stage = WarmStartStageConfig(
        (config.env,), config.policy, config.warm_start, config.run.seed, source_of(config.warm_start)
    )
    if config.warm_start.from_nothing or published:
        return new_policy(stage, session, cluster, spare)
    return warm_start(stage, session, cluster, progress, spare)


def new_policy(config: WarmStartStageConfig, session: Session, cluster: Cluster, spare: Path | None = None) -> Path:
    """Returns the folder of a policy that has learned nothing here; what standardises its inputs is measured."""
    stage = StageSpec(_STAGE, f"{NewPolicyStage.__module__}.NewPolicyStage", config)
    cached = cache_folder(config, cluster.kind)
    return common.made_once(cached, stage, 1, session, cluster, lambda executor: None, spare)


def warm_start(
    config: WarmStartStageConfig,
    session: Session,
    cluster: Cluster,
    progress: ShowProgress,
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
    stage = StageSpec(_STAGE, f"{WarmStartStage.__module__}.WarmStartStage", config, collective=True)
    cached = cache_folder(config, cluster.kind)
    teach = lambda executor: _clone(executor, config, progress)  # noqa: E731
    return common.made_once(cached, stage, NUM_DATA_BLOCKS, session, cluster, teach, spare)


def _clone(executor: Executor, config: WarmStartStageConfig, progress: ShowProgress) -> None:
    """Collects demonstrations, then fits the whole policy, then all but its stem."""
    total = sum(len(config.demonstrations(block)) for block in range(NUM_DATA_BLOCKS))
    done = solved = 0
    for number in range(max(of_type(executor.facts[_STAGE], int))):
        answers = of_type(executor.call(_STAGE, "collect", StepContext(number)), dict)
        done += sum(answer["episodes"] for answer in answers)
        solved += sum(answer["solved"] for answer in answers)
        progress("demonstrations", done, total, f"{solved} solved")
    if config.source is not None and solved < total:
        _LOG.warning("%d of %d episodes of %s do not solve the task here", total - solved, total, config.source.path)
    executor.call(_STAGE, "prepare", StepContext(0))
    for whole, epochs in ((True, config.warm_start.epochs), (False, config.warm_start.head_epochs)):
        executor.call(_STAGE, "begin_phase", StepContext(0), whole)
        common.fit(executor, _STAGE, epochs, 1, "cloning" if whole else "cloning the head", progress)
