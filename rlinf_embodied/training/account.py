"""Timing and results of a run: notes, summary.json and trace.json."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import cast

import psutil

from rlinf_embodied.execution.iteration import IterationResult
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.run_reader import kept_weights
from rlinf_embodied.telemetry.trace import Span, StartupClock, stage_seconds, write_trace
from rlinf_embodied.training.job import Evaluated, Job, Progress
from rlinf_embodied.training.planning import Planning
from rlinf_embodied.training.running import Running

_BEST_NOTE = {  # by whether checks chose the best weights
    True: "biased upwards: the highest of several checks; `after` is measured on other episodes",
    False: "biased upwards: the highest of several evaluations on the same episodes; use another eval.seed for it",
}
_MAX_SPANS = 20000  # in a trace: the newest ones


class Account:
    """Collects spans and metrics of a run, and writes its summary."""

    def __init__(self, job: Job, started: float) -> None:
        """`started` is the time of the command in seconds since the epoch."""
        self.startup = StartupClock(started, job.first_work)
        psutil.cpu_percent()  # each call measures since the last one
        self._job, self._started = job, started
        self._spans: list[Span] = []

    def note_start(self, spans: Sequence[Span], view: LiveView) -> None:
        """Prints the start-up time once, after the first work."""
        if self.startup.first(spans):
            view.note(str(self.startup))

    def add(
        self, progress: Progress, result: IterationResult, metrics: dict[str, float], seconds: float, before: int
    ) -> None:
        """Counts an iteration and completes its metrics; it began at the global step `before`."""
        progress.iteration += 1
        progress.rollout_s += seconds
        self._spans = [*self._spans, *result.spans][-_MAX_SPANS:]
        metrics[self._job.speed] = (progress.global_step - before) / seconds
        metrics["time/iteration_s"] = seconds
        metrics["time/total_s"] = progress.rollout_s
        metrics["system/cpu"] = psutil.cpu_percent() / 100  # fractions of this machine's cores and memory
        metrics["system/memory"] = psutil.virtual_memory().percent / 100
        metrics |= stage_seconds(result.spans)

    def weights_digest(self, running: Running) -> str:
        """Returns the SHA-256 of the trained weights of all learners; raises the errors of workers."""
        step_context, call = StepContext(running.progress.iteration), running.executor.call
        digests = [str(call(stage, "weights_digest", step_context)[0]) for stage in self._job.learners]
        return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def close(self, running: Running, planning: Planning, after: Evaluated, digest: str, view: LiveView) -> None:
        """Writes the summary, the trace and the job's curve, and prints the result.

        `after` is the final evaluation, `digest` that of the weights.

        Raises:
            RlinfError: a worker failed, or a file cannot be written.
        """
        progress, folder = running.progress, running.folder
        assert progress.before is not None
        kept = int(progress.best["iteration"]) if progress.best and progress.returned else progress.iteration
        content = {
            "iterations": progress.iteration,
            **self._job.summary(running.executor, progress, after),
            "before": progress.before,
            "after": after.summary(),
            "rl_s": progress.rollout_s,
            "checks_s": progress.checks_s,
            "best": progress.best,
            "best_note": progress.best and _BEST_NOTE[running.checking is not None],
            "weights_of_iteration": kept,
            "wall_s": time.time() - self._started,
            "startup_s": self.startup.phases | {f"first {self._job.first_work}": self.startup.total_s},
            "plan": planning.plan.name,
            "predicted_s_per_iteration": planning.predicted_s,
            "measured_s_per_iteration": progress.rollout_s / max(1, progress.iteration),
            "weights_sha256": digest,
        }
        folder.write_json("summary.json", content)
        write_trace(folder.path / "trace.json", self._spans)
        lines, last = self._job.finish(folder, cast("dict[str, object]", progress.before), after)
        checks = f" and {progress.checks_s / 60:.1f} of checks" if progress.checks_s else ""
        last += f" ({progress.rollout_s / 60:.1f} min of {self._job.work}{checks}); "
        last += f"weights: {kept_weights(kept, progress.iteration)}"
        page = f"page     python experiments/report.py run.dir={folder.path}"
        for line in (planning.report(folder), *lines, f"summary  {folder.path / 'summary.json'}", page, last):
            view.note(line)
