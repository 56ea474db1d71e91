"""RL training for embodied AI: workflows written once, planned and run anywhere.

    from rlinf_embodied import train
    from rlinf_embodied.compose import compose_train

    summary = train(compose_train(["env=point_reach", "run.num_iterations=2"]))

The commands of experiments/ are these functions of a config, which is composed or built from its dataclasses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_embodied.config import (
        ClusterConfig,
        EvaluateAnswersConfig,
        EvaluateConfig,
        ExportConfig,
        MathConfig,
        ServeConfig,
        TrainConfig,
    )
    from rlinf_embodied.runtime.session import Session
    from rlinf_embodied.training.job import Job

__all__ = ["evaluate", "export", "serve", "train"]


def train(
    config: TrainConfig | MathConfig, started: float | None = None, sessions: Callable[..., Session] | None = None
) -> dict[str, Any]:
    """Trains what the config's type says, and returns what <run.dir>/summary.json holds.

    Args:
        config: of the training.
        started: when the command was given, in seconds since the epoch; None: now.
        sessions: makes the workers' session from the config's section `cluster`; None: the one that it names.

    Raises:
        RlinfError: the input is wrong, or the work failed.
        Stopped: a signal asked for the end of the run, which can be resumed.
    """
    from rlinf_embodied.compose import pin
    from rlinf_embodied.config import MathConfig
    from rlinf_embodied.plug_ins import targets_of

    pin(config)
    workflow = "reasoning" if isinstance(config, MathConfig) else "embodied"
    begin_workers(config.cluster, targets_of(asdict(config)), workflow)
    job: Job
    if isinstance(config, MathConfig):
        from rlinf_embodied.reasoning.job import ReasoningJob

        job = ReasoningJob(config)
    else:
        from rlinf_embodied.embodied.starting_point import require_start

        require_start(config)
        from rlinf_embodied.embodied.job import EmbodiedJob

        job = EmbodiedJob(config)
    from rlinf_embodied.runtime.stop_signals import Stopped
    from rlinf_embodied.training.trainer import Trainer

    trainer = Trainer(job, started, sessions)
    code = trainer.run()
    if code:
        raise Stopped(code - 128)
    return json.loads((trainer.folder / "summary.json").read_text(encoding="utf-8"))


def begin_workers(cluster: ClusterConfig, targets: Iterable[str], workflow: str = "embodied") -> None:
    """Has Ray start for a training while torch is imported here, and a process import what its workers need.

    Of the code that the config names, `targets`, a user's is left to the workers, which report its errors.
    """
    if cluster.session != "ray" or cluster.address is not None:
        return
    from rlinf_embodied.runtime.ray_cluster import begin_ray

    parts = {target.rpartition(".")[0] for target in targets}
    ours = sorted(part for part in parts if part.startswith(("envs.", "policies.", "rlinf_embodied.")))
    begin_ray(cluster.object_store_bytes, [f"rlinf_embodied.{workflow}.job", *ours])


def evaluate(config: EvaluateConfig | EvaluateAnswersConfig) -> dict[str, Any]:
    """Evaluates a policy or a language model, and returns what <run.dir>/eval_info.json holds."""
    from rlinf_embodied.compose import pin
    from rlinf_embodied.config import EvaluateConfig

    pin(config)
    if isinstance(config, EvaluateConfig):
        from rlinf_embodied.embodied.evaluate import evaluate_command as evaluate_policy

        return evaluate_policy(config)
    from rlinf_embodied.reasoning.evaluation import evaluate_command as evaluate_answers

    return evaluate_answers(config)


def export(config: ExportConfig) -> dict[str, Any]:
    """Writes episodes of a policy as a dataset, and returns how many were `run`, `solved` and `written`."""
    from rlinf_embodied.compose import pin

    pin(config)
    from rlinf_embodied.embodied.export import export_dataset

    return export_dataset(config, lambda done, total: print(f"episodes {done}/{total}", flush=True))


def serve(config: ServeConfig) -> None:
    """Serves the policy of a checkpoint until a signal ends it."""
    import asyncio

    from rlinf_embodied.compose import pin

    pin(config)
    from rlinf_embodied.embodied.serving import PolicyServer

    asyncio.run(PolicyServer(config).run())
