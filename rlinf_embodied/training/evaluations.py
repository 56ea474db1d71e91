"""Evaluations and checks of a training on its way, and which of the weights that they saw are the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.training.checkpoints import Checkpoints
from rlinf_embodied.training.job import Evaluated, Job
from rlinf_embodied.training.recovery import Safely
from rlinf_embodied.training.running import Running


class Evaluations:
    """Evaluates and checks the learners' present weights, and keeps the best."""

    def __init__(
        self,
        job: Job,
        checkpoints: Checkpoints,
        running: Running,
        safely: Safely,
        note: Callable[[str], None],
        worked: Callable[[Sequence[Span]], None],
    ) -> None:
        """Evaluates nothing yet.

        Args:
            job: what is trained.
            checkpoints: hold the run's progress, and keep the best.
            running: the stages.
            safely: outlives lost workers.
            note: tells a person.
            worked: is given what was timed in an evaluation.
        """
        self._job, self._checkpoints, self._running = job, checkpoints, running
        self._safely, self._note, self._worked = safely, note, worked

    @property
    def is_reached(self) -> bool:
        """Whether a check found that the run's goal is reached."""
        goal, reached = self._job.goal, self._checkpoints.progress.reached
        return goal is not None and reached is not None and reached >= goal

    def evaluate(self, step: int, label: str) -> Evaluated:
        """Evaluates the learner's present weights on all devices.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        self._note(f"evaluating {label} ...")
        result = self._safely(f"evaluation {label}", lambda: self._evaluated(step))
        self._worked(result.spans)
        self._note(f"evaluation {label}: {result}")
        return result

    def _evaluated(self, step: int) -> Evaluated:
        self._running.update(self._running.evaluation, step)
        return self._running.evaluation.run(step)

    def check(self, metrics: dict[str, float]) -> None:
        """Looks whether the run's goal is reached, and adds what it found to an iteration's metrics.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        self._safely("check", lambda: self._checked(metrics))

    def _checked(self, metrics: dict[str, float]) -> None:
        progress, checking = self._checkpoints.progress, self._running.checking
        assert checking is not None
        start = time.time()
        self._running.update(checking, progress.iteration)
        best = progress.best
        result = checking.run(progress.iteration, None if best is None else best["score"])
        if result.score is not None and (best is None or result.score >= best["score"]):
            progress.best = {"score": result.score, "iteration": progress.iteration}
            self._checkpoints.write_best(self._running.executor)
        progress.checks_s += time.time() - start
        progress.reached = self._job.goal if result.reached and progress.iteration > 0 else None
        said = "; the goal is reached" if progress.reached else ""
        metrics["check/ended_early"] = float(result.score is None)
        if result.score is None:
            said = "; ended early, it can no longer equal the best"
        else:  # the share of a check that ended early says little
            metrics |= {name.replace("eval/", "check/"): value for name, value in result.metrics().items()}
        self._note(f"check at {progress.iteration}: {result}{said}")

    def keep_best(self, found: Evaluated) -> None:
        """Keeps the weights of the best evaluation on the way and after, where no checks of a goal choose the best.

        Raises:
            RlinfError: what cannot be recovered from.
        """
        checkpoints, progress = self._checkpoints, self._checkpoints.progress
        best = progress.best_evaluation
        if self._running.checking is not None or not self._job.eval_every or found.score is None:
            return
        if best is None or found.score >= best["score"]:
            progress.best_evaluation = {"score": found.score, "iteration": progress.iteration}
            if self._safely("checkpoint", lambda: checkpoints.write_best(self._running.executor)):
                self._note(f"the best so far is kept: {checkpoints.best_folder(progress.best_evaluation)}")
