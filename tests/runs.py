"""Small runs for tests: point_reach, a policy of some ten thousand parameters, one process unless stated otherwise."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import pytest
from placements import looped
from torch import Tensor

from experiments.bench.harness.trainings import job_of
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import compose_train
from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.embodied import job as embodied_job
from rlinf_embodied.errors import RlinfError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.interfaces.options import NoOptions
from rlinf_embodied.learning.weights import WeightsMessage
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.reasoning import job as reasoning_job
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession, Session
from rlinf_embodied.training.job import Progress
from rlinf_embodied.training.trainer import Trainer

_Config = TypeVar("_Config")
OPTION = "policy.options."
POLICIES = {
    "tiny_vla": "policies.tiny_vla.TinyVLA",
    "flow_vla": "policies.flow_vla.FlowVLA",
    "state": "policies.state_policy.StatePolicy",
    "actor_critic": "policies.actor_critic.ActorCritic",
    "soft_actor": "policies.soft_actor.SoftActor",
}
TINY = {
    "env": "point_reach",
    "cluster": "serial",
    "run.seed": 3,
    "run.num_iterations": 3,
    "env.num_envs": 16,
    "env.block_size": 4,
    "env.obs_size": 16,
    "env.chunk": 4,
    "env.horizon": 12,
    "env.chunks_per_rollout": 4,  # rollouts cut episodes, which have three chunks
    "policy.options.hidden_size": 32,
    "policy.options.num_layers": 1,
    "policy.options.num_heads": 2,
    "policy.options.stem_width": 16,
    "policy.options.keypoints": 4,
    "policy.options.num_bins": 9,
    "policy.options.critic_hidden_size": 16,
    "policy.options.instruction_length": 4,
    "algorithm.epochs": 2,
    "algorithm.num_minibatches": 2,
    "algorithm.value_epochs": 2,
    "algorithm.lr": 1e-3,
    "algorithm.target_kl": "null",
    "warm_start.num_demos": 32,  # about half of the clone's episodes succeed
    "warm_start.epochs": 1,
    "warm_start.head_epochs": 16,
    "warm_start.head_batch_size": 16,
    "warm_start.head_lr": 5e-3,
    "eval.num_episodes": 6,
    "eval.num_envs": 4,
    "eval.record_video": "false",
    "eval.num_videos": 3,
    "eval.video_size": 32,
}
SFT = [  # four epochs
    *("algorithm=sft", "algorithm.epochs=1", "algorithm.head_epochs=3", "run.num_iterations=4"),
    *("algorithm.head_lr=5e-3", "algorithm.head_batch_size=16", "checkpoint.every=1"),
    *("algorithm.num_minibatches=-", "algorithm.value_epochs=-", "algorithm.target_kl=-"),
]
SHORT = [
    *("run.num_iterations=3", "checkpoint.every=2", "env.num_envs=8", "algorithm.epochs=1", "algorithm.value_epochs=1"),
    *("eval.num_episodes=2", "eval.num_envs=2", "warm_start.from_scratch=true"),
    "recovery.snapshot_share=1",
]
FOUR = ["run.num_iterations=4", "checkpoint.every=2", "eval.num_episodes=3", "eval.num_envs=3"]
BEHIND = [
    *("run.num_iterations=4", "checkpoint.every=1", "env.carry_over=true", "plan=collocated", "plan.max_staleness=2"),
    *("algorithm.tis_cap=2.0", "algorithm.lr_end_fraction=1.0"),
]
GRPO = [
    "algorithm=grpo",
    "algorithm.group_size=4",
    "algorithm.min_groups=4",
    "env.auto_reset=false",
    "env.chunks_per_rollout=3",
]


def tiny_overrides(*overrides: str) -> list[str]:
    """Returns the command line of a run that takes about a second; `overrides` win, and `-` leaves a key out."""
    given = dict(text.split("=", 1) for text in overrides)
    known = _options_of(given.get("policy._target_") or POLICIES.get(given.get("policy", "tiny_vla"), ""))
    start = {k: v for k, v in TINY.items() if not k.startswith(OPTION) or k.removeprefix(OPTION) in known}
    return [f"{key}={value}" for key, value in (start | given).items() if value != "-"]


def _options_of(target: str | None) -> list[str]:
    """Returns the names of the options that a policy has."""
    try:
        kind = getattr(load_target(target or ""), "options_type", NoOptions)
    except (RlinfError, ImportError, AttributeError, ValueError):
        return []
    return [each.name for each in fields(kind)]


def tiny(*overrides: str) -> TrainConfig:
    """Returns the config of that run."""
    given = tuple(tiny_overrides(*overrides))
    reads_a_file = any(text.startswith(("env=", "plan=")) and "/" in text for text in given)
    return compose_train(given) if reads_a_file else fresh(compose_train, given)


def fresh(compose: Callable[[tuple[str, ...]], _Config], overrides: Iterable[str]) -> _Config:
    """Returns a config of its own, without composing the same one twice: that takes a fifth of a second."""
    return copy.deepcopy(_composed(compose, tuple(overrides)))


@functools.cache
def _composed(compose: Callable[[tuple[str, ...]], _Config], overrides: tuple[str, ...]) -> _Config:
    return compose(overrides)


def short(*overrides: str) -> TrainConfig:
    """Three short iterations, a checkpoint after the second."""
    return tiny(*SHORT, *overrides)


def four(folder: Path, *overrides: str) -> TrainConfig:
    """Four iterations, a checkpoint after every second."""
    return tiny(f"run.dir={folder}", *FOUR, *overrides)


def trainer_of(config: TrainConfig | MathConfig) -> Trainer:
    return Trainer(job_of(config))


def train(config: TrainConfig | MathConfig, code: int = 0, draws: bool = False) -> dict:
    """Runs a whole training in this process and returns its summary ({} if it was stopped); drawing takes as long."""
    with pytest.MonkeyPatch.context() as patch:
        for job in () if draws else (embodied_job, reasoning_job):
            patch.setattr(job, "plot_curve", lambda folder: folder / "curve.png")
        assert trainer_of(config).run() == code
    path = Path(config.run.dir or "") / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


def trees(env: object, policy: object, actor: object, shards: int = 1) -> list[dict]:
    """Returns a plan that places the three stages of training."""
    return looped(env, policy, shards, actor=actor)


def cluster(devices: int) -> Cluster:
    """Returns cores as devices."""
    return Cluster("test", "cpu", devices, devices, 0)


def clone(config: TrainConfig | MathConfig, session: Session | None = None, devices: int = 1) -> Path:
    """Returns the folder of the clone or model that `config` starts from, made now or found in the cache."""
    return job_of(config).starting_policy(session or SerialSession(), cluster(devices), lambda *progress: None)


def executor_for(
    config: TrainConfig | MathConfig, plan: list[dict], devices: int, session: Session, folder: Path | None = None
) -> Executor:
    """Returns the training workflow of `config` under a plan, started from a policy folder, or from what it is to."""
    job = job_of(config)
    start = folder or job.starting_policy(SerialSession(), cluster(1), lambda *progress: None)
    workflow = job.workflow(str(start))
    return Executor(workflow, resolve("test", plan, devices, workflow), session, cluster(devices))


def iterate(
    config: TrainConfig | MathConfig, executor: Executor, number: int, progress: Progress | None = None
) -> list[dict[str, float]]:
    """Runs iterations as a training does, from where it is, and returns their metrics, without times."""
    job, progress, found = job_of(config), progress or Progress(), []
    for _ in range(number):
        found.append(without_times(job.run_iteration(executor, progress)[1]))
        progress.iteration += 1
    return found


def digest(executor: Executor, learner: str = "actor") -> str:
    """Returns the SHA-256 of a learner's weights; all of its workers must have the same."""
    (value,) = set(executor.call(learner, "weights_digest", StepContext(0)))
    return str(value)


def learned(config: TrainConfig | MathConfig, devices: int) -> tuple[str, dict[str, float]]:
    """Makes an iteration in so many workers; returns the digest of the learner's weights and what was reported."""
    job, session, places = job_of(config), SerialSession(), cluster(devices)
    start = job.starting_policy(session, places, lambda *_: None)
    executor = Executor.on_all_devices(job.workflow(str(start)), session, places)
    job.prepare(executor, lambda *_: None)
    _, metrics = job.run_iteration(executor, Progress())
    return digest(executor, job.learners[0]), metrics


def exported_weights(executor: Executor) -> dict[str, Tensor]:
    """Returns copies of the weights that the actor sends."""
    message = executor.call("actor", "export_weights", StepContext(0))[0]
    assert isinstance(message, WeightsMessage)
    return {name: value.clone() for name, value in message.tensors.items()}


def weights_of(folder: Path) -> str:
    """Returns the SHA-256 of the weights that a run ended with."""
    return json.loads((folder / "summary.json").read_text())["weights_sha256"]


def metric_rows(folder: Path) -> list[dict]:
    """Returns what metrics.jsonl says about the training, without anything that was timed."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [without_times(row) for row in rows]


def without_times(metrics: dict) -> dict:
    charts = ("SPS", "tokens_per_s", "update_tflop_per_s", "rows_waiting", "queue_s", "tail_share")
    timed = ("time/", "system/", *(f"charts/{name}" for name in charts))
    return {name: value for name, value in metrics.items() if not name.startswith(timed)}
