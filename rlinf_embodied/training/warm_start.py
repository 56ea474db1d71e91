"""What warm starts of all workflows have in common: a policy that a stage makes once, and finds in the cache again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rlinf_embodied import portable
from rlinf_embodied.cache import cache_root, writable_place
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.learning.checkpoint_writer import write_whole
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.run_folder import library_versions
from rlinf_embodied.workflow.graph import StageSpec, Workflow

_LOG = logging.getLogger(__name__)
_MARKER = "config.json"  # of a folder that holds a policy


def cache_folder(root: str, name: str, key: Mapping[str, object], libraries: Iterable[str]) -> Path:
    """Returns where a policy is cached: keyed by all that it is a function of.

    Args:
        root: of the cache, as configured.
        name: begins the folder's, for people.
        key: what of the configuration, the seed and the kind of device decides what is made.
        libraries: whose versions do.
    """
    versions = library_versions()
    of_process = {"portable": portable.is_pinned(), "libraries": {k: versions[k] for k in versions if k in libraries}}
    text = json.dumps({**key, **of_process}, sort_keys=True, default=str)
    return cache_root(root) / "warm_start" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def made_once(
    cached: Path,
    stage: StageSpec,
    num_blocks: int,
    session: Session,
    cluster: Cluster,
    teach: Callable[[Executor], None],
    spare: Path | None = None,
) -> Path:
    """Returns the folder of a policy, made now or found in the cache; the session's workers are left without stages.

    Args:
        cached: where it is kept, see `cache_folder`.
        stage: makes it; its `save(step_context, folder)` writes it.
        num_blocks: of the stage's data.
        session: where the work runs.
        cluster: its devices; at most `num_blocks` of them are used.
        teach: calls the stage until the policy is what it is to be.
        spare: the policy goes below it where the cache cannot be written.

    Raises:
        ConfigError: the cache cannot be written, and there is no `spare`.
    """
    folder = writable_place(cached, spare)
    if (folder / _MARKER).exists():
        _LOG.info("warm start: cached policy in %s", folder)
        return folder
    executor = Executor.on_all_devices(Workflow("warm start", num_blocks, {stage.name: stage}), session, cluster)
    teach(executor)

    def write(partial: Path) -> None:
        executor.call(stage.name, "save", StepContext(0), str(partial.absolute()))
        executor.collect(stage.name, partial, of_first=True)

    write_whole(folder, write, _MARKER)
    session.clear()
    return folder


def fit(executor: Executor, stage: str, total: int, per_call: int, what: str, progress: ShowProgress) -> None:
    """Trains a stage: its `fit(step_context, (first, last))` does these of `total` steps and returns the mean loss."""
    for first in range(0, total, per_call):
        last = min(first + per_call, total)
        loss = executor.call(stage, "fit", StepContext(first), (first, last))[0]
        progress(what, last, total, f"loss {loss:.3f}")
