"""What a training starts from: a model folder, a checkpoint, or a small model fine-tuned once and cached."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path

from rlinf_embodied import portable
from rlinf_embodied.cache import cache_root, writable_place
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import MathConfig
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.flow.graph import StageSpec, Workflow
from rlinf_embodied.flow.plan import resolve
from rlinf_embodied.learning.checkpoint import write_whole
from rlinf_embodied.reasoning.fine_tuning_stage import NUM_BLOCKS
from rlinf_embodied.runtime.host import Tick
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.run_folder import library_versions

_LOG = logging.getLogger(__name__)
_VERSION = 1  # of what a cached policy depends on beside its key
_PLAN = [{"tree": {"leaf": {"stage": "fine_tuning", "devices": "all"}}}]
_STEPS_PER_CALL = 50
_OF_OTHER_MODELS = ("critic_target", "lora", "precision", "system_prompt", "chat_template_args")  # of `policy`


def starting_policy(
    config: MathConfig, session: Session, cluster: Cluster, progress: ShowProgress, spare: Path | None = None
) -> Path:
    """Returns the folder that a training starts from: a given one, or that of a model that is fine-tuned now.

    That one is kept in the cache; below `spare` where the cache cannot be written.
    """
    given = config.policy.folder or config.warm_start.checkpoint
    if given is not None:
        return Path(given).expanduser()
    folder = writable_place(cache_folder(config, cluster.kind == "cpu"), spare)
    if (folder / "config.json").exists():
        _LOG.info("warm start: cached model in %s", folder)
        return folder
    own = bool(config.data.files) or config.data._target_ is not None
    assert not own, "these have no solutions in a form that is known; MathConfig refuses it"
    return _fine_tuned(config, folder, session, cluster, progress)


def cache_folder(config: MathConfig, exact_cpu: bool) -> Path:
    """Returns where the fine-tuned model of this configuration is cached: keyed by all that it is a function of."""
    root = cache_root(config.warm_start.cache_dir)
    settings = {k: v for k, v in asdict(config.warm_start).items() if k not in ("cache_dir", "checkpoint")}
    libraries = ("torch", "transformers")
    key = {
        "version": _VERSION,
        "data": {"level": config.data.level, "form": config.data.form},
        "policy": {k: v for k, v in asdict(config.policy).items() if k not in _OF_OTHER_MODELS},
        "warm_start": settings,
        "seed": config.run.seed,
        "cpu": exact_cpu,
        "portable": portable.is_pinned(),
        "libraries": {k: v for k, v in library_versions().items() if k in libraries},
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return root / "warm_start" / f"{config.data.level.replace(',', '+')}-{digest}"


def _fine_tuned(config: MathConfig, folder: Path, session: Session, cluster: Cluster, progress: ShowProgress) -> Path:
    stage = StageSpec(
        "fine_tuning", "rlinf_embodied.reasoning.fine_tuning_stage.FineTuningStage", config, collective=True
    )
    workflow = Workflow("warm start", NUM_BLOCKS, {"fine_tuning": stage})
    devices = min(cluster.num_devices, NUM_BLOCKS)
    executor = Executor(workflow, resolve("warm start", _PLAN, devices, workflow), session, cluster)
    steps = config.warm_start.steps
    for first in range(0, steps, _STEPS_PER_CALL):
        last = min(first + _STEPS_PER_CALL, steps)
        loss = executor.call("fine_tuning", "fit", Tick(first), (first, last))[0]
        progress("fine-tuning", last, steps, f"loss {loss:.3f}")
    write_whole(folder, lambda partial: executor.call("fine_tuning", "save", Tick(0), str(partial)))
    session.clear()
    return folder
