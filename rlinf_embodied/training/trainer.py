"""One training run of any job, from the configuration to the summary.

prepare   run folder, cluster, session                    nothing expensive has started
start     starting policy or resume -> a policy folder; the plan (planning.py); workers with all stages; evaluation
iterate   the job's iteration -> metrics -> checkpoint    an iteration is the transaction: what dies in it is lost
          times that drift from the prediction -> another plan, from a checkpoint, at the iteration's border
finish    evaluation after; summary, trace, curve
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import cast

from rlinf_embodied.cluster.hardware import Cluster, cluster_at_hand
from rlinf_embodied.compose import to_yaml
from rlinf_embodied.errors import DataError
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.flow.plan import Plan
from rlinf_embodied.learning.checkpoint import find_latest
from rlinf_embodied.runtime import transport
from rlinf_embodied.runtime.host import Tick
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.runtime.sessions import make_session
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.metrics import MetricsWriter
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.telemetry.startup import StartupClock
from rlinf_embodied.telemetry.trace import Span, stage_seconds, write_trace
from rlinf_embodied.training.interrupt import INTERRUPTED, StopRequest, stop_on_interrupt
from rlinf_embodied.training.job import Evaluated, Evaluating, Job, Progress
from rlinf_embodied.training.planning import Planning
from rlinf_embodied.training.resume import checkpoint_to_resume, saved_progress

# what a stage does beside its calls; plans price it apart from them
_NOT_COMPUTING = (".export_weights", ".install_weights", ".offload", ".onload")


@dataclass(slots=True)
class _Running:
    """The stages that are up: they change with the plan, the workers stay."""

    session: Session
    executor: Executor
    evaluation: Evaluating


class Trainer:
    """Runs one training; `run` is the whole story."""

    def __init__(self, job: Job, started: float | None = None) -> None:
        """Checks what can be checked before anything expensive starts.

        Raises:
            ConfigError: the run folder cannot be written, or is in use and resume=never.
            PlanError: the plan does not fit the cluster.
            CheckpointError: the checkpoint to resume from, or to start from, is missing, damaged or foreign.
        """
        self._job, self._config = job, job.config
        self._started = started or time.time()
        self._startup = StartupClock(self._started, job.first_work)
        self._resumed = checkpoint_to_resume(self._config)
        job.require_checkpoint(self._resumed)
        self._cluster: Cluster = cluster_at_hand(self._config.cluster)
        self._planning = Planning(job, self._cluster, job.workflow(""))
        self._folder = RunFolder(Path(self._config.run.dir or f"runs/{job.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
        self._spans: list[Span] = []
        self._progress = Progress()
        self._saved: int | None = None  # the iteration of the newest checkpoint

    # -------------------------------------------------------------------------------------------------------- run
    def run(self) -> int:
        """Runs the training and returns the exit code: 0, or 130 after Ctrl-C."""
        config = self._config
        self._folder.write_text("config.yaml", to_yaml(config))
        self._folder.write_manifest(config.run.seed, self._cluster)
        self._startup.mark("command line and imports")
        session = make_session(config.cluster)
        self._startup.mark("session")
        assert is_dataclass(config)
        try:
            writer = MetricsWriter(self._folder.path, wandb=config.run.wandb, config=asdict(config))
            try:
                with LiveView(config.run.num_iterations, self._job.title, self._job.columns) as view:
                    return self._run(session, writer, view)
            finally:
                writer.close()
        finally:
            session.close()

    def _run(self, session: Session, writer: MetricsWriter, view: LiveView) -> int:
        policy_folder = self._resumed or self._job.starting_policy(session, self._cluster, view.progress)
        self._startup.mark("warm start")
        plan = self._choose_plan(session, policy_folder, view)
        running = self._start(session, plan, policy_folder, self._resumed, view)
        with stop_on_interrupt() as stop:
            if self._progress.before is None:
                self._progress.before = self._evaluate(running, 0, view, "before").summary()
            self._iterate(running, writer, view, stop)
        if stop.asked:
            self._planning.report(self._folder)
            view.note(f"stopped after iteration {self._progress.iteration}; resume with the same command")
            return INTERRUPTED
        after = self._evaluate(running, self._config.run.num_iterations, view, "after")
        self._finish(running.executor, after, view)
        return 0

    def _choose_plan(self, session: Session, policy_folder: Path, view: LiveView) -> Plan:
        workflow = self._job.workflow(str(policy_folder))
        first = 0 if self._resumed is None else saved_progress(self._resumed).iteration
        plan, why = self._planning.choose(workflow, session, self._folder, view.progress, first)
        view.note(why)
        self._startup.mark("profile and plan")
        return plan

    def _start(
        self, session: Session, plan: Plan, policy_folder: Path, checkpoint: Path | None, view: LiveView
    ) -> _Running:
        """Builds the stages of training and evaluation from a policy folder, and loads a checkpoint's other state."""
        executor = Executor(self._job.workflow(str(policy_folder)), plan, session, self._cluster)
        routes = transport.with_bytes(executor.routes, self._planning.edge_bytes_per_item)
        self._folder.write_json("transports.json", [route.to_dict() for route in routes])
        view.note(f"transports\n{transport.table(routes)}")
        if checkpoint is not None:
            self._progress = self._job.load(executor, checkpoint)
            self._saved = self._progress.iteration
        self._startup.mark("stages", executor.setup_s)
        evaluation = self._job.evaluation(session, self._cluster, str(policy_folder), self._folder)
        running = _Running(session, executor, evaluation)
        if checkpoint is not None:  # all that the actor holds; later on it may send what changed only
            self._update_evaluation(running, self._progress.iteration)
        self._startup.mark("evaluation stages")
        return running

    def _switch(self, running: _Running, plan: Plan, view: LiveView) -> None:
        """Goes on under another plan: a checkpoint is the snapshot, and the workers build all stages anew from it."""
        if self._saved != self._progress.iteration:
            self._save(running.executor)
        latest = find_latest(self._folder.checkpoints)
        assert latest is not None
        running.session.clear()
        started = self._start(running.session, plan, latest, latest, view)
        running.executor, running.evaluation = started.executor, started.evaluation

    def _evaluate(self, running: _Running, step: int, view: LiveView, label: str) -> Evaluated:
        """Evaluates the actor's present weights on all devices."""
        view.note(f"evaluating {label} ...")
        self._update_evaluation(running, step)
        result = running.evaluation.run(step)
        self._note_start(result.spans, view)
        view.note(f"evaluation {label}: {result}")
        return result

    def _update_evaluation(self, running: _Running, step: int) -> None:
        """Sends the actor's weights to those workers that evaluate and do not share them."""
        executor, evaluation = running.executor, running.evaluation
        hosts = executor.workers("actor")
        missing = [(worker, evaluation.stage) for worker in evaluation.workers if worker not in hosts]
        if missing:
            executor.send_weights(running.session, (hosts[0], "actor"), missing, Tick(step))

    def _note_start(self, spans: Sequence[Span], view: LiveView) -> None:
        if self._startup.first(spans):
            view.note(str(self._startup))

    # ---------------------------------------------------------------------------------------------------- iterate
    def _iterate(self, running: _Running, writer: MetricsWriter, view: LiveView, stop: StopRequest) -> None:
        config = self._config
        while self._progress.iteration < config.run.num_iterations and not stop.asked:
            progress = self._progress  # another one after a switch of plans
            start, before = time.time(), progress.global_step
            try:
                result, metrics = self._job.run_iteration(running.executor, progress)
            except DataError:  # there is nothing to learn from any more; what was learnt is kept
                if self._saved != progress.iteration:
                    self._save(running.executor)
                raise
            self._note_start(result.spans, view)
            self._account(result, metrics, time.time() - start, before)
            number = progress.iteration
            if self._job.eval_every and number % self._job.eval_every == 0 and number < config.run.num_iterations:
                metrics |= self._evaluate(running, number, view, f"at {number}").metrics()
            writer.write(progress.global_step, number, metrics)
            view.update(number, metrics)
            due = config.checkpoint.every and number % config.checkpoint.every == 0
            if due or number == config.run.num_iterations:
                self._save(running.executor)
            self._replan(running, result, metrics, view, stop)
        if stop.asked and self._saved != self._progress.iteration:  # before the first iteration too
            self._save(running.executor)

    def _replan(
        self,
        running: _Running,
        result: IterationResult,
        metrics: Mapping[str, float],
        view: LiveView,
        stop: StopRequest,
    ) -> None:
        """Compares the iteration with its prediction, and goes on under another plan where that is due."""
        computing = stage_seconds([span for span in result.spans if not span.name.endswith(_NOT_COMPUTING)])
        stages = {name: computing[f"time/{name}_s"] for name in running.executor.workflow.stages}
        rounds = running.executor.workflow.rounds(result.reports)
        number = self._progress.iteration - 1
        goes_on = self._progress.iteration < self._config.run.num_iterations and not stop.asked
        plan, told = self._planning.observe(number, metrics["time/iteration_s"], stages, rounds, goes_on)
        if told:
            view.note(told)
        if plan is not None:
            start = time.time()
            self._planning.write(self._folder)
            self._switch(running, plan, view)
            view.note(f"switched to {plan.name} in {time.time() - start:.1f} s")

    def _account(self, result: IterationResult, metrics: dict[str, float], seconds: float, before: int) -> None:
        progress = self._progress
        progress.iteration += 1
        progress.rollout_s += seconds
        self._spans = [*self._spans, *result.spans][-20000:]
        metrics[self._job.speed] = (progress.global_step - before) / seconds
        metrics["time/iteration_s"] = seconds
        metrics["time/total_s"] = progress.rollout_s
        metrics |= stage_seconds(result.spans)

    def _save(self, executor: Executor) -> None:
        self._job.save(executor, self._folder.checkpoints, self._progress)
        self._saved = self._progress.iteration

    # ----------------------------------------------------------------------------------------------------- finish
    def _finish(self, executor: Executor, after: Evaluated, view: LiveView) -> None:
        progress = self._progress
        digest = executor.call("actor", "weights_digest", Tick(progress.iteration))[0]
        assert progress.before is not None
        self._folder.write_json(
            "summary.json",
            {
                "iterations": progress.iteration,
                **self._job.summary(executor, progress, after),
                "before": progress.before,
                "after": after.summary(),
                "rl_s": progress.rollout_s,
                "wall_s": time.time() - self._started,
                "startup_s": self._startup.phases | {f"first {self._job.first_work}": self._startup.total_s},
                "plan": self._planning.plan.name,
                "predicted_s_per_iteration": self._planning.predicted_s,
                "measured_s_per_iteration": progress.rollout_s / max(1, progress.iteration),
                "weights_sha256": digest,
            },
        )
        write_trace(self._folder.path / "trace.json", self._spans)
        lines, last = self._job.finish(self._folder, cast("dict[str, object]", progress.before), after)
        view.note(self._planning.report(self._folder))
        for line in lines:
            view.note(line)
        view.note(f"summary  {self._folder.path / 'summary.json'}")
        view.last_line(f"{last} ({progress.rollout_s / 60:.1f} min of RL)")
