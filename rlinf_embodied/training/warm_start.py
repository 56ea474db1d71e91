"""What warm starts of all workflows have in common: a policy that a stage makes once, and finds in the cache again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rlinf_embodied import portable
from rlinf_embodied.cache import cache_root, require_writable
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.learning.checkpoint import write_whole
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.run_folder import library_versions
from rlinf_embodied.workflow.graph import Workflow

_LOG = logging.getLogger(__name__)
_MARKER = "config.json"  # of a folder that holds a policy


def cache_folder(root: str, name: str, key: Mapping[str, object], libraries: Iterable[str]) -> Path:
    """Returns where a policy is cached: keyed by all that it is a function of; `name` is for people.

    That is a key of configuration, seed and kind of device, and the versions of some libraries.
    """
    versions = library_versions()
    of_process = {"portable": portable.is_pinned(), "libraries": {k: versions[k] for k in versions if k in libraries}}
    text = json.dumps({**key, **of_process}, sort_keys=True, default=str)
    return cache_root(root) / "warm_start" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns a policy's folder in the cache, in which `make` puts the policy if it is not there.

    Raises:
        ConfigError: the cache cannot be written.
    """
    if (folder / _MARKER).exists():
        _LOG.info("warm start: cached policy in %s", folder)
    else:
        require_writable(folder)
        write_whole(folder, make, _MARKER)
    return folder


def make_policy(
    workflow: Workflow,
    session: Session,
    cluster: Cluster,
    num_iterations: int,
    progress: ShowProgress,
    folder: Path,
    prepare: Callable[[Executor], None] = lambda executor: None,
) -> None:
    """Fills a folder on this machine with the policy of a workflow's one stage, which learns as in a run.

    There are no evaluations, and no run folder.  The stage has all devices that its blocks suffice for; after
    `prepare` and the iterations its `save_policy(step_context, folder)` writes in its first worker.  The session's
    workers are left without stages.
    """
    executor, (stage,) = Executor.on_all_devices(workflow, session, cluster), workflow.stages
    prepare(executor)
    for number in range(num_iterations):
        metrics = executor.run(StepContext(number)).all_of(stage, dict)[0]
        progress("fine-tuning", number + 1, num_iterations, f"loss {metrics['losses/imitation_loss']:.3f}")
    executor.call(stage, "save_policy", StepContext(0), str(folder.absolute()))
    session.clear()
