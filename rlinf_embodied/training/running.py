"""What a run has at a moment: its stages that are up, its progress, and the copies of its weights."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from pathlib import Path

from rlinf_embodied.execution import snapshots
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.snapshots import Pace, Snapshot
from rlinf_embodied.learning.checkpoint import step_folder
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.job import Evaluated, Evaluating, Job, Progress

_ROUNDING = 1e-9  # of a score


@dataclass
class Running:
    """The stages change with the plan, the workers stay; methods raise a worker's errors."""

    job: Job
    session: Session
    folder: RunFolder
    progress: Progress
    executor: Executor = field(init=False)
    evaluation: Evaluating = field(init=False)
    checking: Evaluating | None = field(init=False)  # if the run has a goal
    policy_folder: Path = field(init=False)  # what every copy of the policy was loaded from
    checkpoint: Path | None = field(init=False)  # what the other state was loaded from
    saved: int | None = None  # the iteration of the newest checkpoint
    snapshot: Snapshot | None = None  # the newest; None: none are kept
    snapshot_progress: Progress | None = None  # of the run when it was taken
    pace: Pace = field(default_factory=Pace)  # of snapshots

    def take_snapshot(self, progress: Progress) -> float:
        """Takes a snapshot of the stages' state at this progress; returns the seconds that it took."""
        start = time.time()
        known = None if self.snapshot is None else self.snapshot.states
        self.snapshot = snapshots.take(self.session, self.executor, progress.iteration, known)
        self.snapshot_progress = copy.deepcopy(progress)
        self.pace.taken(time.time() - start)
        return self.pace.cost_s

    def repeat_until(self, iteration: int) -> None:
        """Runs the iterations since the snapshot again, after it was restored; what they report is known already."""
        progress = copy.deepcopy(self.snapshot_progress)
        while progress is not None and progress.iteration < iteration:
            self.job.run_iteration(self.executor, progress)
            progress.iteration += 1

    def refresh(self) -> None:
        """Sends all that the actor holds to copies outside training; later on it may send what changed only."""
        for stages in (self.evaluation, self.checking) if self.checkpoint is not None else ():
            if stages is not None:
                self._update(stages)

    def _update(self, stages: Evaluating) -> None:
        """Sends the learners' weights to those workers of the stages that do not share them."""
        for learner in self.job.learners:
            hosts = self.executor.workers(learner)
            missing = [worker for worker in stages.executor.workers(stages.stage) if worker not in hosts]
            if missing:
                step_context = StepContext(self.progress.iteration)
                weights, _ = self.executor.export(learner, step_context)
                self.executor.install(weights, stages.stage, missing, step_context)

    def evaluate(self) -> Evaluated:
        """Evaluates the learners' present weights on all devices."""
        self._update(self.evaluation)
        return self.evaluation.run(self.progress.iteration)

    def check(self) -> Evaluated:
        """Checks whether the run's goal is reached by the present weights, which are kept if they are the best."""
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
        """Whether the last run.patience checks were no better than one before them."""
        patience, best = self.job.config.run.patience, self.progress.best
        if not patience or best is None:
            return False
        return self.progress.iteration - best["iteration"] >= patience * self.job.check_every

    @property
    def is_over(self) -> bool:
        return self.progress.iteration >= self.job.config.run.num_iterations or self.is_reached or self.is_stalled

    @property
    def best_folder(self) -> Path | None:
        """Where the weights are that the progress names as the best."""
        best = self.progress.best
        return None if best is None else step_folder(self.folder.best, int(best["iteration"]))

    def keep_best(self, found: Evaluated) -> bool:
        """Keeps the present weights if no earlier score was higher; returns whether that is so."""
        best = self.progress.best
        if found.score is None or (best is not None and found.score < best["score"]):
            return False
        self.progress.best = {"score": found.score, "iteration": self.progress.iteration}
        self.job.save(self.executor, self.folder.best, self.progress)
        return True

    def save(self) -> None:
        """Has a checkpoint written, unless there is one of this very iteration."""
        if self.saved != self.progress.iteration:
            self.job.save(self.executor, self.folder.checkpoints, self.progress)
            self.saved = self.progress.iteration
