"""What a training starts from: a model folder, a checkpoint, or a small model fine-tuned once and cached."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import MathConfig
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.reasoning.fine_tuning_stage import NUM_BLOCKS
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.training import warm_start as common
from rlinf_embodied.workflow.graph import StageSpec, Workflow

_VERSION = 1  # of what a cached policy depends on in addition to its key
_STAGE = StageSpec("fine_tuning", "rlinf_embodied.reasoning.fine_tuning_stage.FineTuningStage", None, collective=True)
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
    own = bool(config.data.files) or config.data._target_ is not None
    assert not own, "these have no solutions in a form that is known; MathConfig refuses it"

    def teach(executor: Executor) -> None:
        common.fit(executor, _STAGE.name, config.warm_start.steps, _STEPS_PER_CALL, "fine-tuning", progress)

    workflow = Workflow("warm start", NUM_BLOCKS, {_STAGE.name: replace(_STAGE, config=config)})
    make = lambda folder: common.make_policy(folder, workflow, _STAGE.name, session, cluster, teach)  # noqa: E731
    return common.made_once(cache_folder(config, cluster.kind == "cpu"), make, spare)


def cache_folder(config: MathConfig, exact_cpu: bool) -> Path:
    """Returns where the fine-tuned model of this configuration is cached: keyed by all that it is a function of."""
    key = {
        "version": _VERSION,
        "data": {"level": config.data.level, "prompt_template": config.data.prompt_template},
        "policy": {k: v for k, v in asdict(config.policy).items() if k not in _OF_OTHER_MODELS},
        "warm_start": {k: v for k, v in asdict(config.warm_start).items() if k not in ("cache_dir", "checkpoint")},
        "seed": config.run.seed,
        "cpu": exact_cpu,
    }
    name = config.data.level.replace(",", "+")
    return common.cache_folder(config.warm_start.cache_dir, name, key, ("torch", "transformers"))
