"""Warm starts of all workflows: a stage trains a policy once, and later runs use the cached one."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rlinf_embodied import portable
from rlinf_embodied.cache import cache_root, cached
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.run_folder import library_versions
from rlinf_embodied.workflow.graph import Workflow

_LOG = logging.getLogger(__name__)
_MARKER = "config.json"  # of a folder that holds a policy


def cache_folder(root: str, name: str, key: Mapping[str, object], libraries: Iterable[str]) -> Path:
    """Returns the cache folder of a policy.

    Its name is `name`, for people, and a hash of everything that determines the policy: `key` (configuration, seed and
    kind of device) and the versions of `libraries`.
    """
    versions = library_versions()
    of_process = {"portable": portable.is_pinned(), "libraries": {k: versions[k] for k in versions if k in libraries}}
    text = json.dumps({**key, **of_process}, sort_keys=True, default=str)
    return cache_root(root) / "warm_start" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns a policy's cache folder, which `make` fills if the policy is not cached.

    Raises:
        ConfigError: the cache cannot be written.
    """
    if (folder / _MARKER).exists():
        _LOG.info("warm start: cached policy in %s", folder)
    return cached(folder, make, _MARKER)


def make_policy(
    workflow: Workflow,
    session: Session,
    cluster: Cluster,
    num_iterations: int,
    progress: ShowProgress,
    folder: Path,
    prepare: Callable[[Executor], None] = lambda executor: None,
) -> None:
    """Trains the policy of a workflow's only stage, and writes it to a folder on this machine.

    The stage is trained on as many devices as it has blocks for, as in a run, but without evaluations and a run folder.
    `prepare` is called before the first iteration; `save_policy(step_context, folder)` of the first worker writes the
    policy.  Afterwards the session's workers have no stages.
    """
    executor, (stage,) = Executor.on_all_devices(workflow, session, cluster), workflow.stages
    prepare(executor)
    for number in range(num_iterations):
        metrics = executor.run(StepContext(number)).all_of(stage, dict)[0]
        progress("fine-tuning", number + 1, num_iterations, f"loss {metrics['losses/imitation_loss']:.3f}")
    executor.call(stage, "save_policy", StepContext(0), str(folder.absolute()))
    session.clear()
