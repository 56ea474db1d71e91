"""Short trainings on one device of this process: their starting policies and their results."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from torch import Tensor

from rlinf_embodied.cluster.hardware import Cluster, cluster_at_hand
from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.learning.weights import WeightsMessage
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.reasoning.job import ReasoningJob
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import SerialSession, Session, make_session, of_type
from rlinf_embodied.telemetry.trace import Span, busy_seconds
from rlinf_embodied.training.job import Job, Progress
from rlinf_embodied.workflow.graph import Workflow

COLLOCATED = [{"items": ["env+policy on all", "actor on all"]}]


def job_of(config: TrainConfig | MathConfig) -> Job:
    return ReasoningJob(config) if isinstance(config, MathConfig) else EmbodiedJob(config)


def starting_folder(config: TrainConfig | MathConfig, in_process: bool = False) -> str:
    """Returns the folder of the policy that training starts from; made first if it is not in the cache."""
    session = SerialSession() if in_process else make_session(config.cluster)
    cluster = one_device() if in_process else cluster_at_hand(config.cluster)
    try:
        return str(job_of(config).starting_policy(session, cluster, lambda *progress: None))
    finally:
        session.close()


def one_device(kind: str = "cpu") -> Cluster:
    return Cluster("bench", kind, 1, 1, 0)


@contextmanager
def in_this_process(workflow: Workflow, variants: Sequence, kind: str = "cpu") -> Iterator[Executor]:
    """Yields an executor of a plan on one device of this process."""
    session = SerialSession()
    try:
        yield Executor(workflow, resolve("bench", variants, 1, workflow), session, one_device(kind))
    finally:
        session.close()


def iterations(job: Job, executor: Executor, count: int) -> Iterator[tuple[IterationResult, dict[str, float]]]:
    """Yields what each of `count` iterations gave, and its metrics."""
    progress = Progress()
    for _ in range(count):
        yield job.run_iteration(executor, progress)
        progress.iteration += 1


@contextmanager
def resting(sessions: Iterable[Session]) -> Iterator[None]:
    """Stops the workers of sessions meanwhile: an idle worker of Ray's takes up to a hundredth of a core.

    A training has no workers but its own, and is to be timed like that.
    """
    stopped = [pid for session in sessions for pid in getattr(session, "processes", dict)().values()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def outside_stages(spans: Iterable[Span], seconds: float) -> float:
    """Returns the share of an iteration that its busiest worker spent in no stage: submission, wires, waiting."""
    busy: dict[int, float] = {}
    for (worker, _), in_stage in busy_seconds(spans).items():
        busy[worker] = busy.get(worker, 0.0) + in_stage
    return 1 - max(busy.values()) / seconds


def timed_iteration(
    steps: Iterator[tuple[IterationResult, dict[str, float]]], others: Iterable[Session]
) -> tuple[float, float]:
    """Runs the next iteration while the workers of `others` rest; returns its seconds, and their share in no stage."""
    with resting(others):
        start = time.perf_counter()
        result, _ = next(steps)
        seconds = time.perf_counter() - start
    return seconds, outside_stages(result.spans, seconds)


def weights_of(executor: Executor) -> dict[str, Tensor]:
    """Returns the actor's weights, on the CPU."""
    (message,) = of_type(executor.call("actor", "export_weights", StepContext(0)), WeightsMessage)
    return dict(message.tensors)


def digest_of(executor: Executor) -> str:
    """Returns the digest of the actor's weights, which all of its workers have."""
    (digest,) = {str(found) for found in executor.call("actor", "weights_digest", StepContext(0))}
    return digest
