"""Evaluations and checks of a training on its way, and which of the weights that they saw are the best."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlinf_embodied.training.checkpoints import Checkpoints
from rlinf_embodied.training.job import Evaluated, Job
from rlinf_embodied.training.recovery import Recovery
from rlinf_embodied.training.running import Running


class Evaluations:
    """Evaluates and checks the learners' present weights, and keeps the best.

    The checks of a goal choose the best where the run has one, otherwise its evaluations do.
    """

    def __init__(
        self, job: Job, checkpoints: Checkpoints, running: Running, recovery: Recovery, note: Callable[[str], None]
    ) -> None:
        self._job, self._checkpoints, self._running = job, checkpoints, running
        self._recovery, self._note = recovery, note

    @property
    def is_reached(self) -> bool:
        """Whether a check found that the run's goal is reached."""
        goal, reached = self._job.goal, self._checkpoints.progress.reached
        return goal is not None and reached is not None and reached >= goal

    def evaluate(self, label: str) -> Evaluated:
        """Evaluates the learner's present weights on all devices.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        self._note(f"evaluating {label} ...")
        result = self._recovery.repeat(f"evaluation {label}", self._evaluated)
        self._note(f"evaluation {label}: {result}")
        return result

    def _evaluated(self) -> Evaluated:
        step, evaluation = self._checkpoints.progress.iteration, self._running.evaluation
        self._running.update(evaluation, step)
        return evaluation.run(step)

    def check(self, metrics: dict[str, float]) -> None:
        """Checks whether the run's goal is reached, and adds the result to an iteration's metrics.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        self._recovery.repeat("check", lambda: self._checked(metrics))

    def _checked(self, metrics: dict[str, float]) -> None:
        progress, checking = self._checkpoints.progress, self._running.checking
        assert checking is not None
        start = time.time()
        self._running.update(checking, progress.iteration)
        result = checking.run(progress.iteration, None if progress.best is None else progress.best["score"])
        if self._is_best(result):
            self._checkpoints.write_best()
        progress.checks_s += time.time() - start
        progress.reached = self._job.goal if result.reached and progress.iteration > 0 else None
        remark = "; the goal is reached" if progress.reached else ""
        metrics["check/ended_early"] = float(result.score is None)
        if result.score is None:
            remark = "; ended early, it can no longer equal the best"
        else:  # the share of a check that ended early says little
            metrics |= {name.replace("eval/", "check/"): value for name, value in result.metrics().items()}
        self._note(f"check at {progress.iteration}: {result}{remark}")

    def _is_best(self, found: Evaluated) -> bool:
        """Returns whether no earlier score was higher, and notes this one then."""
        progress = self._checkpoints.progress
        if found.score is None or (progress.best is not None and found.score < progress.best["score"]):
            return False
        progress.best = {"score": found.score, "iteration": progress.iteration}
        return True

    def keep_best(self, found: Evaluated) -> None:
        """Keeps the weights of the best evaluation on the way and after, where no checks of a goal choose the best.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        if self._running.checking is not None or not self._job.eval_every or not self._is_best(found):
            return
        best = self._checkpoints.progress.best
        if self._recovery.repeat("checkpoint", self._checkpoints.write_best) and best is not None:
            self._note(f"the best so far is kept: {self._checkpoints.best_folder(best)}")
