"""RL training for embodied AI: workflows written once, planned and run anywhere.

    from rlinf_embodied import train
    from rlinf_embodied.compose import compose_train

    summary = train(compose_train(["env=point_reach", "run.num_iterations=2"]))

The commands of experiments/ are these functions of a config, which is composed or built from its dataclasses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_embodied.config import (
        ClusterConfig,
        EvaluateAnswersConfig,
        EvaluateConfig,
        ExportConfig,
        MathConfig,
        TrainConfig,
    )
    from rlinf_embodied.runtime.session import Session
    from rlinf_embodied.training.job import Job

__all__ = ["evaluate", "export", "train"]


def train(
    config: TrainConfig | MathConfig,
    started: float | None = None,
    sessions: Callable[[ClusterConfig], Session] | None = None,
) -> dict[str, Any]:
    """Trains what the config's type says, and returns what <run.dir>/summary.json holds.

    Args:
        config: of the training.
        started: when the command was given, in seconds since the epoch; None: now.
        sessions: makes the workers' session; None: as `cluster` says.

    Raises:
        RlinfError: the input is wrong, or the work failed.
        Stopped: a signal asked for the end of the run, which can be resumed.
    """
    from rlinf_embodied.command_line import pin

    pin(config)
    job = begin(config)
    from rlinf_embodied.runtime.stop_signals import Stopped
    from rlinf_embodied.training.trainer import Trainer

    trainer = Trainer(job, started, sessions)
    code = trainer.run()
    if code:
        raise Stopped(code - 128)
    return json.loads((trainer.folder / "summary.json").read_text(encoding="utf-8"))


def _worker_modules(config: TrainConfig | MathConfig) -> list[str]:
    """Returns what workers import for a config; a user's own code is left to them, which report its errors."""
    from dataclasses import asdict

    from rlinf_embodied.config import MathConfig
    from rlinf_embodied.plug_ins import targets_of

    parts = {target.rpartition(".")[0] for target in targets_of(asdict(config))}
    own = sorted(part for part in parts if part.startswith(("envs.", "policies.")))
    kind = "reasoning" if isinstance(config, MathConfig) else "embodied"
    return [f"rlinf_embodied.{kind}.job", *own]


def begin(config: TrainConfig | MathConfig) -> Job:
    """Returns the job of a config, and has Ray start meanwhile; torch is imported once the input is found right."""
    from rlinf_embodied.config import MathConfig

    if config.cluster.session == "ray" and config.cluster.address is None:
        from rlinf_embodied.runtime.ray_cluster import begin_ray

        begin_ray(config.cluster.object_store_bytes, _worker_modules(config))
    if isinstance(config, MathConfig):
        from rlinf_embodied.reasoning.job import ReasoningJob

        return ReasoningJob(config)
    from rlinf_embodied.embodied.starting_point import require_start

    require_start(config)
    from rlinf_embodied.embodied.job import EmbodiedJob

    return EmbodiedJob(config)


def evaluate(config: EvaluateConfig | EvaluateAnswersConfig) -> dict[str, Any]:
    """Evaluates a policy or a language model, and returns what <run.dir>/eval_info.json holds."""
    from rlinf_embodied.command_line import pin
    from rlinf_embodied.config import EvaluateConfig

    pin(config)
    if isinstance(config, EvaluateConfig):
        from rlinf_embodied.embodied.evaluate import evaluate_command as evaluate_policy

        return evaluate_policy(config)
    from rlinf_embodied.reasoning.evaluation import evaluate_command as evaluate_answers

    return evaluate_answers(config)


def export(config: ExportConfig) -> dict[str, Any]:
    """Writes episodes of a policy as a dataset, and returns how many were `run`, `solved` and `written`."""
    from rlinf_embodied.command_line import pin

    pin(config)
    from rlinf_embodied.embodied.export import export_dataset

    return export_dataset(config, lambda done, total: print(f"episodes {done}/{total}", flush=True))
