"""Supervised fine-tuning as a job: a training in which nothing acts and an iteration is an epoch of demonstrations."""

from __future__ import annotations

from functools import cached_property

from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.fine_tuning import (
    FineTuningConfig,
    demonstrate,
    fine_tuning_stage,
    fine_tuning_workflow,
)
from rlinf_embodied.embodied.job import EmbodiedJob
from rlinf_embodied.embodied.sources import DemonstrationSource, sources_of
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.telemetry.live import Column
from rlinf_embodied.training.job import Progress
from rlinf_embodied.workflow.graph import Workflow


class FineTuningJob(EmbodiedJob):
    """See `Job`."""

    work = "fine-tuning"

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.columns = (
            Column("loss", "losses/imitation_loss", ".3f"),
            Column("held-out loss", "losses/held_out_loss", ".3f"),
            Column("held-out action error", "losses/held_out_action_error", ".3f"),
            Column("updates/s", self.speed, ".0f", after=True),
        )
        self._filled: Executor | None = None  # whose stage has its demonstrations
        self._progress: ShowProgress = lambda *_: None

    @cached_property
    def sources(self) -> tuple[DemonstrationSource, ...]:
        """What is learned from."""
        return sources_of(self.config)

    def _digests(self) -> list[str]:
        return [source.digest for source in self.sources if source.digest]

    def launch_notes(self) -> list[str]:
        """Returns how many episodes are learned from."""
        every, out = sum(source.num_episodes for source in self.sources), self._stage().num_held_out
        kinds = ", ".join(dict.fromkeys(source.kind.value for source in self.sources))
        return [f"data     {every - out} episodes to learn from, {out} held out (algorithm.held_out): {kinds}"]

    def _stage(self, policy_folder: str = "") -> FineTuningConfig:
        return fine_tuning_stage(self.config, self.sources, policy_folder)

    def workflow(self, policy_folder: str) -> Workflow:
        return fine_tuning_workflow(self._stage(policy_folder))

    def prepare(self, executor: Executor, progress: ShowProgress) -> None:
        """Has the demonstrations made when the run begins; rebuilt stages make them when there are epochs to come."""
        self._progress = progress
        if self._filled is None:
            self._fill(executor)

    def _fill(self, executor: Executor) -> None:
        if self._filled is not executor:
            demonstrate(executor, self._stage(), self._progress)
            self._filled = executor

    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        self._fill(executor)
        return super().run_iteration(executor, progress)
