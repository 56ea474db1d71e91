"""One training run of any job, from the configuration to the summary.

prepare   run folder, cluster, session                    nothing expensive has started
start     starting policy or resume -> a policy folder; the plan (planning.py); workers with all stages (running.py)
iterate   the job's iteration -> snapshot, if due -> evaluation or check (evaluations.py) -> metrics -> checkpoint
          a worker that is lost is replaced, and the iterations since the newest snapshot are run again (recovery.py)
          times that drift from the prediction -> another plan, from a checkpoint, at the iteration's border
finish    evaluation after; summary, trace, curve (account.py)
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import TypeVar

from rlinf_embodied import portable
from rlinf_embodied.cache import cache_root
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import ClusterConfig, Exactness
from rlinf_embodied.errors import DataError, HangError, RlinfError, WorkerError
from rlinf_embodied.execution import snapshots
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.learning.checkpoint import find_latest, point_latest, verify
from rlinf_embodied.runtime.session import Session, find_cluster, find_remaining, make_session
from rlinf_embodied.runtime.stop_signals import StopRequest, ends_when_asked
from rlinf_embodied.telemetry.boards import require_boards, start_boards
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.metrics import MetricsWriter
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.telemetry.trace import stage_seconds
from rlinf_embodied.training.account import Account, weights_digest
from rlinf_embodied.training.checkpoints import Checkpoints, outliving
from rlinf_embodied.training.evaluations import Evaluations
from rlinf_embodied.training.job import Job
from rlinf_embodied.training.planning import Planning
from rlinf_embodied.training.recovery import Recovery, Safely, is_fault
from rlinf_embodied.training.resume import checkpoint_to_resume, require_unused, saved_progress
from rlinf_embodied.training.running import Running

# what a stage does in addition to its calls; plans price it separately
_NOT_COMPUTING = (".export_weights", ".install_weights", ".offload", ".onload")
_RECOVERIES = "recoveries.jsonl"  # what each fault cost
_Result = TypeVar("_Result")


class Trainer:
    """Runs one training; `run` is the whole story."""

    def __init__(
        self, job: Job, started: float | None = None, sessions: Callable[[ClusterConfig], Session] | None = None
    ) -> None:
        """Checks what can be checked before anything expensive starts.

        Args:
            job: what is trained.
            started: when the command was given, seconds since the epoch.
            sessions: makes the session that it runs in, where that is not the config's.

        Raises:
            ConfigError: the run folder cannot be written, is another run's at this moment, is in use and resume=never,
                or holds a run of other settings; run.exact=portable in a process that is not pinned; what run.wandb
                or run.trackio asks for is not installed.
            PlanError: the plan does not fit the cluster.
            CheckpointError: the checkpoint to resume from, or to start from, is missing, damaged or foreign.
        """
        self._job, self._config, self._sessions = job, job.config, sessions
        require_boards(self._config.run)
        self._account = Account(job, started or time.time())
        path = Path(self._config.run.dir or f"runs/{job.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        require_unused(self._config)
        cache_root(job.cache_dir)  # asks where home is
        folder = RunFolder(path, locked=True) if path.is_dir() else None  # while its checkpoints are looked at, too
        try:
            self._resumption = checkpoint_to_resume(self._config)
            self._resumed = None if self._resumption is None else self._resumption.path
            job.require_checkpoint(self._resumed)
            self._cluster: Cluster = find_cluster(self._config.cluster)
            if self._config.run.exact is Exactness.portable and self._cluster.kind == "cpu":
                portable.require()
                portable.verify()
            resumed = None if self._resumed is None else saved_progress(self._resumed).staleness
            self._planning = Planning(job, self._cluster, job.workflow(""), resumed)
            self._folder = folder or RunFolder(path, locked=True)
        except BaseException:
            if folder is not None:
                folder.unlock()
            raise
        self._checkpoints = Checkpoints(job, self._folder)
        self._switched_s = 0.0  # that the last switch of plans took

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._folder.path

    # -------------------------------------------------------------------------------------------------------- run
    def run(self) -> int:
        """Runs the training and returns the exit code: 0; after Ctrl-C, SIGTERM or SIGHUP 130, 143 or 129."""
        try:
            return self._run_locked()
        finally:
            self._folder.unlock()

    def _run_locked(self) -> int:
        config = self._config
        self._folder.write_text("config.yaml", to_yaml(config))
        self._folder.write_manifest(config.run.seed, self._cluster)
        if self._resumed is not None and self._resumed.parent == self._folder.checkpoints:
            point_latest(self._resumed)  # the run that wrote it may have been killed before, or newer ones be damaged
        self._account.startup.mark("command line and imports")
        session = (self._sessions or make_session)(config.cluster)
        self._account.startup.mark("session")
        assert is_dataclass(config)
        try:
            folder = self._folder.path
            boards = start_boards(folder, config.run, config.wandb, config.trackio, asdict(config))
            writer = MetricsWriter(folder, boards)
            try:
                with LiveView(config.run.num_iterations, self._job.columns, folder / "console.log") as view:
                    for line in self._job.launch_notes():
                        view.note(line)
                    if self._resumption is not None:
                        view.note(self._resumption.note)
                    return self._run(session, writer, view)
            finally:
                writer.close()
        finally:
            session.close()

    def _run(self, session: Session, writer: MetricsWriter, view: LiveView) -> int:
        record = lambda restart: self._folder.append_json(_RECOVERIES, asdict(restart))  # noqa: E731
        regroup = lambda: self._regroup(view)  # noqa: E731
        self._recovery = Recovery(session, self._config.recovery, view.note, record, regroup)
        repeat = self._recovery.repeat
        policy_folder = self._resumed or repeat("warm start", lambda: self._start_anew(session, view), session.clear)
        self._account.startup.mark("warm start")
        repeat("profile and plan", lambda: self._choose_plan(session, policy_folder, view), session.clear)
        started = lambda: self._start(session, policy_folder, self._resumed, view)  # noqa: E731
        running = repeat("set-up of the stages", started, session.clear)
        self._make_helpers(running, view)
        try:
            return self._work(running, writer, view)
        except (WorkerError, HangError) as error:
            self._rescue(running, error, view)
            raise

    def _make_helpers(self, running: Running, view: LiveView) -> None:
        """Makes what saves and evaluates the stages that are up."""

        def safely(what: str, work: Callable[[], _Result]) -> _Result:
            return self._recovery.repeat(what, work, lambda: self._restore(running, view))

        started = lambda spans: self._account.note_start(spans, view)  # noqa: E731
        self._safely: Safely = safely
        self._checkpoints.serve(running, safely)
        self._evaluations = Evaluations(self._job, self._checkpoints, running, safely, view.note, started)

    def _work(self, running: Running, writer: MetricsWriter, view: LiveView) -> int:
        """Evaluates, iterates and evaluates; returns the exit code."""
        with ends_when_asked() as stop:
            after = None
            if self._checkpoints.progress.before is None:
                after = self._evaluations.evaluate(0, "before")
                self._checkpoints.progress.before = after.summary()
            self._iterate(running, writer, view, stop)
            self._checkpoints.write_at_last()
        if stop.asked:
            self._planning.report(self._folder)
            view.note(f"stopped after iteration {self._checkpoints.progress.iteration}; resume with the same command")
            return stop.exit_code
        if after is None or self._checkpoints.progress.iteration > 0:  # otherwise nothing was trained since
            after = self._evaluations.evaluate(self._checkpoints.progress.iteration, "after")
            self._evaluations.keep_best(after)
            self._checkpoints.write_at_last()
        progress = self._checkpoints.progress
        digest = self._safely("digest", lambda: weights_digest(self._job, running.executor, progress.iteration))
        self._account.close(self._folder, self._planning, running.executor, progress, after, digest, view)
        return 0

    def _start_anew(self, session: Session, view: LiveView) -> Path:
        return self._job.starting_policy(session, self._cluster, view.progress, self._folder.path)

    def _choose_plan(self, session: Session, policy_folder: Path, view: LiveView) -> None:
        workflow = self._job.workflow(str(policy_folder))
        first = 0 if self._resumed is None else saved_progress(self._resumed).iteration
        _, why = self._planning.choose(workflow, session, self._folder, view.progress, first)
        view.note(why)
        self._account.startup.mark("profile and plan")

    def _start(
        self,
        session: Session,
        policy_folder: Path,
        checkpoint: Path | None,
        view: LiveView,
        snapshot: snapshots.Snapshot | None = None,
    ) -> Running:
        """Builds the stages of training and evaluation from a policy folder, then loads a checkpoint or a snapshot."""
        if checkpoint is not None:  # stages are rebuilt from it, or copy files of it, when it may have been dropped
            policy_folder = checkpoint = outliving(checkpoint, self._folder.path)
        executor = Executor(self._job.workflow(str(policy_folder)), self._planning.plan, session, self._cluster)
        if checkpoint is not None:
            self._checkpoints.load(executor, checkpoint)
        self._job.prepare(executor, view.progress)
        if snapshot is not None:
            snapshots.restore(executor, snapshot)
        self._account.startup.mark("stages")
        evaluation = self._job.evaluation(session, self._cluster, str(policy_folder), self._folder)
        job, folder = self._job, str(policy_folder)
        checking = None if job.goal is None else job.checking(session, self._cluster, folder)
        running = Running(job, session, executor, evaluation, checking, policy_folder, checkpoint, snapshot)
        running.refresh(self._checkpoints.progress.iteration)
        if self._config.recovery.max_restarts > 0 and snapshot is None:
            running.pace.share = self._config.recovery.snapshot_share
            running.take_snapshot(self._checkpoints.progress)
        self._account.startup.mark("evaluation stages")
        return running

    # ----------------------------------------------------------------------------------------------------- recovery
    def _restore(self, running: Running, view: LiveView) -> None:
        """Rebuilds all stages in the state at the start of the next iteration."""
        checkpoints = self._checkpoints
        progress, saved = checkpoints.progress, checkpoints.saved
        running.session.clear()  # workers that are left finish what they write
        origin = (running.folder, running.checkpoint)
        try:
            running.become(self._start(running.session, *origin, view, running.snapshot))
        finally:  # the checkpoint's progress is not that of the snapshot
            checkpoints.progress, checkpoints.saved = progress, saved
        running.repeat_until(progress.iteration)

    def _regroup(self, view: LiveView) -> None:
        """Plans for what is left of the cluster, after a node was lost.

        Raises:
            ConfigError: this node is no part of a cluster any more.
        """
        self._cluster = find_remaining(self._config.cluster)
        plan = self._planning.move(self._cluster, self._checkpoints.progress.iteration)
        under = "" if plan is None else f", under plan {plan.name}"
        view.note(f"continuing with {self._cluster.num_devices} devices ({self._cluster.description}){under}")

    def _transaction(self, running: Running) -> tuple[IterationResult, dict[str, float], float]:
        """Runs an iteration; returns what came of it, and its seconds.  Until its end is kept it has not happened."""
        progress = copy.deepcopy(self._checkpoints.progress)
        progress.staleness = running.executor.plan.staleness
        start = time.time()
        result, metrics = self._job.run_iteration(running.executor, progress)
        seconds = time.time() - start
        if running.snapshot is not None and running.pace.is_due(seconds):
            metrics["time/snapshot_s"] = running.take_snapshot(replace(progress, iteration=progress.iteration + 1))
        self._checkpoints.advance(progress)
        return result, metrics, seconds

    def _rescue(self, running: Running, error: WorkerError | HangError, view: LiveView) -> None:
        """Saves what was learnt before a fault that is one too many."""
        checkpoints = self._checkpoints
        if not is_fault(error) or running.snapshot is None or checkpoints.is_saved:
            return
        try:
            running.session.replace(error.workers)
            self._restore(running, view)
            if not checkpoints.write(running.executor, self._folder.checkpoints):
                view.note("the iteration could not be saved, as the disk is full: resume from the newest checkpoint")
                return
            view.note(f"iteration {checkpoints.progress.iteration} is saved: go on from there with the same command")
        except RlinfError as another:
            view.note(
                f"nothing could be saved any more ({another}): the same command goes on from the newest checkpoint"
            )

    def _switch(self, running: Running, view: LiveView) -> None:
        """Switches to another plan: a checkpoint is the snapshot, and the workers rebuild all stages from it."""
        self._checkpoints.save_once()
        self._checkpoints.write_at_last()
        latest = find_latest(self._folder.checkpoints)
        assert latest is not None
        self._renew(running, latest, view)

    def _renew(self, running: Running, checkpoint: Path, view: LiveView) -> None:
        """Rebuilds all stages from a checkpoint that this run wrote."""
        verify(checkpoint)
        self._recovery.repeat("new stages", lambda: self._renewed(running, checkpoint, view), lambda: None)

    def _renewed(self, running: Running, checkpoint: Path, view: LiveView) -> None:
        running.session.clear()
        running.become(self._start(running.session, checkpoint, checkpoint, view))

    def _return_to_best(self, running: Running, view: LiveView) -> None:
        """Goes back to the weights of the best check, where the run ended without having reached its goal."""
        progress = self._checkpoints.progress
        if running.checking is None or progress.best is None or self._evaluations.is_reached or progress.returned:
            return
        progress.returned = True
        number = int(progress.best["iteration"])
        if number != progress.iteration:
            view.note(f"the goal was not reached: the weights of iteration {number}, the best by checks, are kept")
            self._renew(running, self._checkpoints.best_folder(progress.best), view)
            self._checkpoints.progress = progress  # not that of the checkpoint
            running.saved = copy.deepcopy(progress)  # no iterations are to be run again from here
        self._checkpoints.save()

    # ---------------------------------------------------------------------------------------------------- iterate
    def _iterate(self, running: Running, writer: MetricsWriter, view: LiveView, stop: StopRequest) -> None:
        config = self._config
        if running.checking and self._checkpoints.progress.best is None and self._goes_on() and not stop.asked:
            self._evaluations.check({})
        while self._goes_on() and not stop.asked:
            progress = self._checkpoints.progress  # another one after a switch of plans
            progress.returned = False  # a finished run may go on for more iterations
            before, what = progress.global_step, f"iteration {progress.iteration + 1}"
            try:
                result, metrics, seconds = self._safely(what, lambda: self._transaction(running))
            except DataError:  # there is nothing to learn from any more; what was learnt is kept
                self._checkpoints.save_once()
                raise
            progress = self._checkpoints.progress
            self._account.note_start(result.spans, view)
            self._account.add(progress, result, metrics, seconds, before)
            number = progress.iteration
            if self._job.eval_every and number % self._job.eval_every == 0 and number < config.run.num_iterations:
                found = self._evaluations.evaluate(number, f"at {number}")
                metrics |= found.metrics()
                self._evaluations.keep_best(found)
            if running.checking and (number % self._job.check_every == 0 or number >= config.run.num_iterations):
                self._evaluations.check(metrics)
            writer.write(progress.global_step, number, metrics)
            writer.write_samples(progress.global_step, number, self._job.samples(result))
            view.update(number, metrics)
            for warning in self._job.warnings(metrics):
                view.note(f"warning: iteration {number}: {warning}")
            due = config.checkpoint.every and number % config.checkpoint.every == 0
            if due or self._checkpoints.unwritten is not None or not self._goes_on():
                self._checkpoints.save()
            self._replan(running, result, metrics, view, stop)
        if not stop.asked:
            self._return_to_best(running, view)
        else:  # before the first iteration too
            self._checkpoints.save_once()
        if (
            self._checkpoints.saved is None and self._checkpoints.unwritten is None
        ):  # a run of no iterations leaves the policy that others can start from
            self._checkpoints.save()

    def _replan(
        self,
        running: Running,
        result: IterationResult,
        metrics: Mapping[str, float],
        view: LiveView,
        stop: StopRequest,
    ) -> None:
        """Compares the iteration with its prediction, and switches to another plan when that is due."""
        computing = stage_seconds([span for span in result.spans if not span.name.endswith(_NOT_COMPUTING)])
        stages = {name: computing[f"time/{name}_s"] for name in running.executor.workflow.stages}
        rounds = running.executor.workflow.rounds(result.reports)
        number = self._checkpoints.progress.iteration - 1
        goes_on = self._goes_on() and not stop.asked
        remaining = self._config.run.num_iterations - self._checkpoints.progress.iteration if goes_on else 0
        switch_s = max(self._switched_s, sum(running.executor.setup_s.values()))
        plan, told = self._planning.observe(
            number, metrics["time/iteration_s"], stages, rounds, remaining=remaining, switch_s=switch_s
        )
        if told:
            view.note(told)
        if plan is not None:
            start = time.time()
            self._planning.write(self._folder)
            self._switch(running, view)
            self._switched_s = time.time() - start
            view.note(f"switched to {plan.name} in {self._switched_s:.1f} s")

    def _goes_on(self) -> bool:
        iteration = self._checkpoints.progress.iteration
        return iteration < self._config.run.num_iterations and not self._evaluations.is_reached
