"""Supervised fine-tuning as a job: a training in which nothing acts and an iteration is an epoch of demonstrations.

The goal that is checked is a lower held-out loss, which is never reached: the weights with the lowest one are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import SFTConfig, TrainConfig
from rlinf_embodied.embodied.fine_tuning import (
    FineTuningConfig,
    demonstrate,
    fine_tuning_stage,
    fine_tuning_workflow,
)
from rlinf_embodied.embodied.graph import ACTOR
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.embodied.sources import DemonstrationSource, sources_of
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.live import Column
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.training.job import Checking, Evaluated, Progress
from rlinf_embodied.workflow.graph import Workflow


class FineTuningJob(EmbodiedJob):
    """See `Job`."""

    work = "fine-tuning"

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        assert isinstance(config.algorithm, SFTConfig)
        self._algorithm = config.algorithm
        self.columns = (
            Column("loss", "losses/imitation_loss", ".3f"),
            Column("held-out loss", "losses/held_out_loss", ".3f"),
            Column("held-out action error", "losses/held_out_action_error", ".3f"),
            Column("updates/s", self.speed, ".0f", after=True),
        )
        self.check_every = 1
        self._executor: Executor | None = None  # whose stage learns
        self._filled: Executor | None = None  # whose stage has its demonstrations
        self._progress: ShowProgress = lambda *_: None
        self._newest: dict[str, float] | None = None  # how well held-out episodes are imitated

    @cached_property
    def sources(self) -> tuple[DemonstrationSource, ...]:
        """What is learned from."""
        return sources_of(self.config)

    def _digests(self) -> list[str]:
        return [source.digest for source in self.sources if source.digest]

    def require_checkpoint(self, checkpoint: Path | None) -> None:
        """See Job; a resumed run must have the demonstrations that it began with."""
        super().require_checkpoint(checkpoint)
        self.goal = math.inf if self._algorithm.keep_best and self._stage().num_held_out else None

    def launch_notes(self) -> list[str]:
        """Returns how many episodes are learned from."""
        every, out = sum(source.num_episodes for source in self.sources), self._stage().num_held_out
        kinds = ", ".join(dict.fromkeys(source.kind.value for source in self.sources))
        return [f"data     {every - out} episodes to learn from, {out} held out (algorithm.held_out): {kinds}"]

    # ------------------------------------------------------------------------------------------------------- stages
    def _stage(self, policy_folder: str = "") -> FineTuningConfig:
        return fine_tuning_stage(self.config, self.sources, policy_folder)

    def workflow(self, policy_folder: str) -> Workflow:
        return fine_tuning_workflow(self._stage(policy_folder))

    def prepare(self, executor: Executor, progress: ShowProgress) -> None:
        """Has the demonstrations made when the run begins; rebuilt stages make them when there are epochs to come."""
        first = self._executor is None
        self._executor, self._progress = executor, progress
        if first:
            self._fill(executor)

    def _fill(self, executor: Executor) -> None:
        if self._filled is not executor:
            demonstrate(executor, self._stage(), self._progress)
            self._filled = executor

    def checking(self, session: Session, cluster: Cluster, policy_folder: str) -> Checking:
        """The check is the held-out loss."""
        assert self._executor is not None, "stages are prepared before they are asked"
        return _HeldOutCheck(ACTOR, self._executor, self._held_out)

    # ---------------------------------------------------------------------------------------------------- iteration
    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        """The global step counts updates."""
        self._fill(executor)
        result, metrics = super().run_iteration(executor, progress)
        self._newest = self._measure(executor, progress.iteration)
        return result, metrics | self._newest

    def _measure(self, executor: Executor, step: int) -> dict[str, float]:
        self._fill(executor)
        return cast("dict[str, float]", executor.call(ACTOR, "held_out", StepContext(step))[0])

    def _held_out(self, step: int) -> dict[str, float]:
        """Returns the answer of the newest epoch; before the first one it is asked for."""
        assert self._executor is not None
        return self._newest or self._measure(self._executor, step)

    def summary(self, executor: Executor, progress: Progress, after: Evaluated) -> dict[str, object]:
        best = progress.best
        loss = None if best is None else -best["score"]
        return {**super().summary(executor, progress, after), "held_out_loss": loss}


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """See Checked."""

    found: Mapping[str, float]
    spans: Sequence[Span] = ()
    reached: bool = False

    @property
    def score(self) -> float:
        """Minus the loss."""
        return -self.found["losses/held_out_loss"]

    def summary(self) -> dict[str, object]:
        return dict(self.found)

    def metrics(self) -> dict[str, float]:
        return dict(self.found)

    def __str__(self) -> str:
        loss, error = self.found.values()
        return f"held-out loss {loss:.3f}, action error {error:.3f}"


@dataclass(slots=True)
class _HeldOutCheck:
    """A check by the held-out loss: it asks the stage that learns, so there are no weights to send."""

    stage: str
    executor: Executor
    newest: Callable[[int], Mapping[str, float]]

    def run(self, step: int, best: float | None = None) -> _HeldOut:
        return _HeldOut(self.newest(step))
