"""The stages of a training that are up, and the copies of its weights."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from pathlib import Path

from rlinf_embodied.execution import snapshots
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.execution.snapshots import Pace, Snapshot
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.training.job import Checking, Evaluating, Job, Progress


@dataclass
class Running:
    """The stages that are up: they change with the plan, the workers stay."""

    job: Job
    session: Session
    executor: Executor = field(init=False)
    evaluation: Evaluating = field(init=False)
    checking: Checking | None = field(init=False)  # if the run has a goal
    folder: Path = field(init=False)  # what every copy of the policy was loaded from
    checkpoint: Path | None = field(init=False)  # what the other state was loaded from
    snapshot: Snapshot | None = None  # the newest; None: none are kept
    saved: Progress | None = None  # of the run when it was taken
    pace: Pace = field(default_factory=Pace)  # of snapshots

    def take_snapshot(self, progress: Progress) -> float:
        """Takes a snapshot of the stages' state at this progress; returns the seconds that it took."""
        start = time.time()
        known = None if self.snapshot is None else self.snapshot.states
        self.snapshot = snapshots.take(self.session, self.executor, progress.iteration, known)
        self.saved = copy.deepcopy(progress)
        self.pace.taken(time.time() - start)
        return self.pace.cost_s

    def repeat_until(self, iteration: int) -> None:
        """Runs the iterations since the snapshot again, after it was restored; what they report is known already."""
        progress = copy.deepcopy(self.saved)
        while progress is not None and progress.iteration < iteration:
            self.job.run_iteration(self.executor, progress)
            progress.iteration += 1

    def refresh(self, step: int) -> None:
        """Sends all that the actor holds to copies outside training; later on it may send what changed only."""
        for stages in (self.evaluation, self.checking) if self.checkpoint is not None else ():
            if stages is not None:
                self.update(stages, step)

    def update(self, stages: Evaluating | Checking, step: int) -> None:
        """Sends the learners' weights to those workers of the stages that do not share them."""
        for learner in self.job.learners:
            hosts = self.executor.workers(learner)
            missing = [worker for worker in stages.executor.workers(stages.stage) if worker not in hosts]
            if missing:
                self.executor.send_weights(learner, stages.stage, missing, StepContext(step))
