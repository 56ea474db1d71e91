"""The current state of a run: its stages, its progress, and its kept weights."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rlinf_embodied.cluster.hardware import host_memory_bytes
from rlinf_embodied.execution import snapshots
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.snapshots import Pace, Snapshot
from rlinf_embodied.learning.checkpoint import step_folder
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.job import Evaluated, Evaluating, Job, Progress
from rlinf_embodied.training.resume import saved_progress

_ROUNDING = 1e-9  # of a score


@dataclass
class Running:
    """Stages change with the plan; workers stay.  Methods raise the errors of workers."""

    job: Job
    session: Session
    folder: RunFolder
    progress: Progress
    note: Callable[[str], None]  # prints a line
    executor: Executor = field(init=False)
    evaluation: Evaluating = field(init=False)
    checking: Evaluating | None = field(init=False)  # if the run has a goal
    policy_folder: Path = field(init=False)  # from which the stages loaded the policy
    checkpoint: Path | None = field(init=False)  # from which the stages loaded their other state
    saved: int | None = None  # iteration of the newest checkpoint
    snapshot: Snapshot | None = None  # the newest; None: the run keeps no snapshots
    snapshot_progress: Progress | None = None  # at the time of the snapshot, or of what the stages were built from
    pace: Pace = field(default_factory=Pace)  # of snapshots
    takes_snapshots: bool = False

    def take_snapshot(self, progress: Progress) -> float:
        """Takes a snapshot of the stages; returns its duration in seconds.

        If it is too large, no more are taken; an earlier one stays until the next checkpoint.
        """
        start, config = time.time(), self.job.config.recovery
        known = None if self.snapshot is None else self.snapshot.states
        most = host_memory_bytes() / 8 if config.snapshot_max_gb is None else 1e9 * config.snapshot_max_gb
        snapshot = snapshots.take(self.session, self.executor, progress.iteration, known, most)
        self.takes_snapshots = snapshot.num_bytes <= most
        if self.takes_snapshots:
            self.snapshot, self.snapshot_progress = snapshot, copy.deepcopy(progress)
        else:
            self.note(
                f"a snapshot of {snapshot.num_bytes / 1e9:.1f} GB exceeds recovery.snapshot_max_gb={most / 1e9:.1f}: "
                "none are kept, and a lost worker costs the iterations since the newest checkpoint "
                f"(checkpoint.every={self.job.config.checkpoint.every})"
            )
        self.pace.taken(time.time() - start)
        return self.pace.cost_s

    def use_checkpoint(self) -> None:
        """Without a snapshot, makes the newest checkpoint of these weights, if any, the one to restore."""
        if self.snapshot is None and self.saved is not None:
            written = self.saved, self.progress.iteration  # the latter if a fault interrupted `save`
            folders = [f for n in written if (f := step_folder(self.folder.checkpoints, n)).exists()]
            if folders:
                self.policy_folder = self.checkpoint = folders[0]
                self.snapshot_progress = saved_progress(folders[0])

    def repeat_until(self, iteration: int) -> None:
        """Runs the iterations since the restored snapshot again, and ignores their reports."""
        progress = copy.deepcopy(self.snapshot_progress)
        while progress is not None and progress.iteration < iteration:
            self.job.run_iteration(self.executor, progress)
            progress.iteration += 1

    def refresh(self) -> None:
        """Sends the learners' weights to evaluation and checks after a checkpoint was loaded."""
        for stages in (self.evaluation, self.checking) if self.checkpoint is not None else ():
            if stages is not None:
                self._update(stages)

    def _update(self, stages: Evaluating) -> None:
        """Sends the learners' weights to the workers of evaluation stages that do not share them."""
        for learner in self.job.learners:
            source = stages.shares_with or learner
            hosts = self.executor.workers(source) if source in self.executor.workflow.stages else []
            missing = [worker for worker in stages.executor.workers(stages.stage) if worker not in hosts]
            if missing:
                self.executor.send(learner, stages.stage, missing, StepContext(self.progress.iteration))

    def evaluate(self, last: bool = False) -> Evaluated:
        """Evaluates the current weights on all devices; `last`: it is the run's last evaluation."""
        self._update(self.evaluation)
        return self.evaluation.run(self.progress.iteration, last=last)

    def check(self) -> Evaluated:
        """Checks whether the current weights reach the goal, and keeps them if they are the best so far."""
        progress, goal, start = self.progress, self.job.config.run.until_success, time.time()
        assert self.checking is not None
        assert goal is not None
        self._update(self.checking)
        result = self.checking.run(progress.iteration, None if progress.best is None else progress.best["score"])
        self.keep_best(result)
        progress.checks_s += time.time() - start
        reached = result.score is not None and result.score >= goal - _ROUNDING and progress.iteration > 0
        progress.reached = goal if reached else None
        return result

    @property
    def is_reached(self) -> bool:
        goal, reached = self.job.config.run.until_success, self.progress.reached
        return goal is not None and reached is not None and reached >= goal

    @property
    def is_stalled(self) -> bool:
        """Whether the last run.patience checks were no better than an earlier one."""
        patience, best = self.job.config.run.patience, self.progress.best
        if not patience or best is None:
            return False
        return self.progress.iteration - best["iteration"] >= patience * self.job.check_every

    @property
    def is_over(self) -> bool:
        return self.progress.iteration >= self.job.config.run.num_iterations or self.is_reached or self.is_stalled

    @property
    def best_folder(self) -> Path | None:
        """Folder of the best weights so far."""
        best = self.progress.best
        return None if best is None else step_folder(self.folder.best, int(best["iteration"]))

    def keep_best(self, result: Evaluated) -> bool:
        """Keeps the current weights if no earlier score was higher; returns whether it kept them."""
        best = self.progress.best
        if result.score is None or (best is not None and result.score < best["score"]):
            return False
        self.progress.best = {"score": result.score, "iteration": self.progress.iteration}
        self.job.save(self.executor, self.folder.best, self.progress)
        return True

    def save(self) -> None:
        """Writes a checkpoint, unless this iteration has one."""
        if self.saved != self.progress.iteration:
            self.job.save(self.executor, self.folder.checkpoints, self.progress)
            self.saved = self.progress.iteration
            if not self.takes_snapshots:
                self.snapshot = None
