"""One training run of any job, from the configuration to the summary.

prepare   run folder, cluster, session                    nothing expensive has started
start     starting policy or resume -> a policy folder; the plan (planning.py); workers with all stages; evaluation
iterate   the job's iteration -> snapshot -> metrics -> checkpoint
          whoever dies in it is replaced, and what was lost is done again: calls of others (mending.py), or all of it,
          from the snapshot (recovery.py)
          times that drift from the prediction -> another plan, from a checkpoint, at the iteration's border
finish    evaluation after; summary, trace, curve
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

from rlinf_embodied import portable
from rlinf_embodied.cache import cache_root
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import ClusterConfig, Exactness
from rlinf_embodied.errors import CheckpointError, CheckpointWriteError, DataError, HangError, RlinfError, WorkerError
from rlinf_embodied.execution import recovery as snapshots
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.mending import Mender
from rlinf_embodied.learning.checkpoint import find_latest, point_latest, step_folder, verify
from rlinf_embodied.runtime import transport
from rlinf_embodied.runtime.discovery import find_cluster
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import MendingSession, Session
from rlinf_embodied.runtime.sessions import make_session
from rlinf_embodied.stop_signals import StopRequest, ends_when_asked
from rlinf_embodied.telemetry.boards import require_boards, start_boards
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.metrics import MetricsWriter
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.telemetry.startup import StartupClock
from rlinf_embodied.telemetry.trace import Span, stage_seconds, write_trace
from rlinf_embodied.training.checkpoints import bring_checkpoint
from rlinf_embodied.training.job import Checking, Evaluated, Evaluating, Job, Progress
from rlinf_embodied.training.origin import outliving
from rlinf_embodied.training.planning import Planning
from rlinf_embodied.training.recovery import Recovery, is_fault
from rlinf_embodied.training.resume import checkpoint_to_resume, require_unused, saved_progress
from rlinf_embodied.training.store_room import shortage, store_need

_LOG = logging.getLogger(__name__)
# what a stage does beside its calls; plans price it apart from them
_NOT_COMPUTING = (".export_weights", ".install_weights", ".offload", ".onload")
_MUCH = 0.1  # of an iteration's time, for a snapshot
_RECOVERIES = "recoveries.jsonl"  # what each fault cost
_BEST = ("best", "best_evaluation")  # of a run's progress: which weights are kept in its folder of the best
_TRY_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # after which the last checkpoint of a run is written again
_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Running:
    """The stages that are up: they change with the plan, the workers stay."""

    session: Session
    executor: Executor
    evaluation: Evaluating
    checking: Checking | None  # where the run has a goal
    folder: Path  # what every copy of the policy was loaded from
    checkpoint: Path | None  # what the other state was loaded from
    snapshot: snapshots.Snapshot | None = None  # of the iteration that is to come; None: none are kept
    mender: Mender | None = None  # of iterations that lose workers; None: they are done again as a whole

    def become(self, other: _Running) -> None:
        """Takes over the stages of another."""
        self.executor, self.evaluation, self.checking = other.executor, other.evaluation, other.checking
        self.folder, self.checkpoint, self.snapshot = other.folder, other.checkpoint, other.snapshot
        self.mender = other.mender


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
        if self._config.run.exact is Exactness.portable:
            portable.require()
            portable.verify()
        self._started = started or time.time()
        self._startup = StartupClock(self._started, job.first_work)
        path = Path(self._config.run.dir or f"runs/{job.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        require_unused(self._config)
        cache_root(job.cache_dir)  # asks where home is
        folder = RunFolder(path, locked=True) if path.is_dir() else None  # while its checkpoints are looked at, too
        try:
            self._resumption = checkpoint_to_resume(self._config)
            self._resumed = None if self._resumption is None else self._resumption.path
            job.require_checkpoint(self._resumed)
            self._cluster: Cluster = find_cluster(self._config.cluster)
            self._planning = Planning(job, self._cluster, job.workflow(""))
            self._folder = folder or RunFolder(path, locked=True)
        except BaseException:
            if folder is not None:
                folder.unlock()
            raise
        self._spans: list[Span] = []
        self._progress = Progress()
        self._saved: int | None = None  # the iteration of the newest checkpoint
        self._snapshot_noted = False
        self._being_written: Path | None = None  # the checkpoint that a worker writes at this moment
        self._unwritten: CheckpointWriteError | None = None  # why the newest one is not there

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
        self._startup.mark("command line and imports")
        session = (self._sessions or make_session)(config.cluster)
        self._startup.mark("session")
        assert is_dataclass(config)
        try:
            folder = self._folder.path
            boards = start_boards(folder, config.run, config.wandb, config.trackio, asdict(config))
            writer = MetricsWriter(folder, boards)
            try:
                with LiveView(config.run.num_iterations, self._job.title, self._job.columns) as view:
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
        record = lambda mended: self._folder.append_json(_RECOVERIES, asdict(mended))  # noqa: E731
        regroup = lambda: self._regroup(view)  # noqa: E731
        self._recovery = Recovery(session, self._config.recovery, view.note, record, regroup)
        repeat = self._recovery.repeat
        policy_folder = self._resumed or repeat("warm start", lambda: self._start_anew(session, view), session.clear)
        self._startup.mark("warm start")
        repeat("profile and plan", lambda: self._choose_plan(session, policy_folder, view), session.clear)
        started = lambda: self._start(session, policy_folder, self._resumed, view)  # noqa: E731
        running = repeat("set-up of the stages", started, session.clear)
        try:
            return self._work(running, writer, view)
        except (WorkerError, HangError) as error:
            self._rescue(running, error, view)
            raise

    def _work(self, running: _Running, writer: MetricsWriter, view: LiveView) -> int:
        """Evaluates, iterates and evaluates; returns the exit code."""
        with ends_when_asked() as stop, self._saved_at_last(running, view):
            after = None
            if self._progress.before is None:
                after = self._evaluate(running, 0, view, "before")
                self._progress.before = after.summary()
            self._iterate(running, writer, view, stop)
        if stop.asked:
            self._planning.report(self._folder)
            view.note(f"stopped after iteration {self._progress.iteration}; resume with the same command")
            return stop.exit_code
        if after is None or self._progress.iteration > 0:  # otherwise nothing was trained since
            after = self._evaluate(running, self._progress.iteration, view, "after")
            with self._saved_at_last(running, view):
                self._keep_best(running, after, view)
        digest = self._safely(running, view, "digest", lambda: self._digest(running.executor))
        self._finish(running.executor, after, digest, view)
        return 0

    def _start_anew(self, session: Session, view: LiveView) -> Path:
        return self._job.starting_policy(session, self._cluster, view.progress, self._folder.path)

    def _choose_plan(self, session: Session, policy_folder: Path, view: LiveView) -> None:
        workflow = self._job.workflow(str(policy_folder))
        first = 0 if self._resumed is None else saved_progress(self._resumed).iteration
        _, why = self._planning.choose(workflow, session, self._folder, view.progress, first)
        view.note(why)
        self._startup.mark("profile and plan")

    def _start(
        self,
        session: Session,
        policy_folder: Path,
        checkpoint: Path | None,
        view: LiveView,
        snapshot: snapshots.Snapshot | None = None,
    ) -> _Running:
        """Builds the stages of training and evaluation from a policy folder, and loads a checkpoint's other state.

        The plan is that of `Planning`; with a snapshot, that is what they go on from.
        """
        if checkpoint is not None:  # stages are made anew from it, or copy files of it, when it may have been dropped
            policy_folder = checkpoint = outliving(checkpoint, self._folder.path)
        executor = Executor(self._job.workflow(str(policy_folder)), self._planning.plan, session, self._cluster)
        routes = transport.with_bytes(executor.routes, self._planning.edge_bytes_per_item)
        self._folder.write_json("transports.json", [route.to_dict() for route in routes])
        if routes and snapshot is None:
            view.note(f"transports\n{transport.table(routes)}")
        if checkpoint is not None:
            self._progress = self._job.load(executor, checkpoint)
            self._saved = self._progress.iteration
            self._forget_best_that_is_gone()
        self._job.prepare(executor, view.progress)
        if snapshot is not None:
            snapshots.restore(executor, snapshot)
        self._startup.mark("stages", executor.setup_s)
        evaluation = self._job.evaluation(session, self._cluster, str(policy_folder), self._folder)
        job, folder = self._job, str(policy_folder)
        checking = None if job.goal is None else job.checking(session, self._cluster, folder)
        running = _Running(session, executor, evaluation, checking, policy_folder, checkpoint, snapshot)
        self._refresh(running)
        self._let_mend(running)
        if snapshot is None and self._keeps_snapshots:
            running.snapshot = snapshots.take(session, executor, self._progress.iteration)
        if snapshot is None:
            self._note_store(running, routes, view)
        self._startup.mark("evaluation stages")
        return running

    # ----------------------------------------------------------------------------------------------------- recovery
    @property
    def _keeps_snapshots(self) -> bool:
        return self._config.recovery.max_restarts > 0

    def _let_mend(self, running: _Running) -> None:
        """Has iterations mended where the session can: only what is lost is done again."""
        session, checking = running.session, running.checking
        ahead = running.executor.plan.staleness > 0  # data of several iterations is under way
        if ahead or not self._keeps_snapshots or not isinstance(session, MendingSession):
            return
        running.mender = running.executor.mender = Mender(
            *(session, running.executor, self._recovery.mend),
            beside=[running.evaluation.executor, *([] if checking is None else [checking.executor])],
            allows=lambda lost: self._is_written(running, lost),
            refresh=lambda: self._refresh(running),
        )

    def _is_written(self, running: _Running, lost: Collection[int]) -> bool:
        """Returns whether these workers take no part of a checkpoint with them, which is of the iteration's start."""
        if self._being_written is None or running.executor.workers(self._job.learner)[0] not in lost:
            return True
        try:
            verify(self._being_written)
        except CheckpointError:
            return False
        return True

    def _refresh(self, running: _Running) -> None:
        """Sends all that the actor holds to copies beside training; later on it may send what changed only."""
        for stages in (running.evaluation, running.checking) if running.checkpoint is not None else ():
            if stages is not None:
                self._update(running, stages, self._progress.iteration)

    def _safely(self, running: _Running, view: LiveView, what: str, work: Callable[[], _Result]) -> _Result:
        """Does what works with the stages as they are between iterations; again if workers are lost in it."""
        return self._recovery.repeat(what, work, lambda: self._restore(running, view))

    def _restore(self, running: _Running, view: LiveView) -> None:
        """Builds all stages anew, as they were at the start of the iteration that is to come."""
        progress, saved = self._progress, self._saved
        running.session.clear()  # workers that are left finish what they write
        origin = (running.folder, running.checkpoint)
        snapshot = running.snapshot
        try:
            running.become(self._start(running.session, *origin, view, snapshot))
        finally:  # the checkpoint's progress is not that of the snapshot
            self._progress, self._saved = progress, saved
        if self._being_written is not None:  # its worker may be among the lost; it is of this very state
            root, self._being_written = self._being_written.parent, None
            self._begin_checkpoint(running.executor, root)

    def _regroup(self, view: LiveView) -> None:
        """Plans for what is left of the cluster, after a node was lost.

        Raises:
            ConfigError: this node is no part of a cluster any more.
        """
        self._cluster = find_cluster(replace(self._config.cluster, num_devices=None))
        plan = self._planning.move(self._cluster, self._progress.iteration)
        under = "" if plan is None else f", under plan {plan.name}"
        view.note(f"going on with {self._cluster.num_devices} devices ({self._cluster.description}){under}")

    def _transaction(self, running: _Running) -> tuple[IterationResult, dict[str, float], float]:
        """Runs an iteration; returns what came of it, and its seconds.  Until its end is kept it has not happened."""
        progress = copy.deepcopy(self._progress)
        start = time.time()
        if running.mender is not None:
            running.mender.snapshot = running.snapshot
        result, metrics = self._job.run_iteration(running.executor, progress)
        seconds = time.time() - start
        if running.snapshot is not None:
            self._wait_saved(running.executor)  # while it can be begun again
            stages, start = running.snapshot.states, time.time()
            running.snapshot = snapshots.take(running.session, running.executor, progress.iteration + 1, stages)
            metrics["time/snapshot_s"] = time.time() - start
        self._progress = progress
        if self._unwritten is not None:
            self._forget_best_that_is_gone()
        return result, metrics, seconds

    def _note_store(self, running: _Running, routes: Sequence[transport.Route], view: LiveView) -> None:
        """Says before the first iteration where the object store is too small for what this run keeps there."""
        states = {} if running.snapshot is None else running.snapshot.states
        stored = running.session.stored([ref for refs in states.values() for ref in refs])
        if stored is not None:
            executor, weights = running.executor, self._planning.weights_bytes
            need = store_need(executor.workflow, routes, executor.plan.staleness, stored.taken, weights)
            if said := shortage(need, stored.room):
                view.note(said)

    def _note_snapshot(self, metrics: Mapping[str, float], view: LiveView) -> None:
        """Says once where snapshots cost much: they may be larger than the store, and go to the disk."""
        snapshot_s, whole_s = metrics.get("time/snapshot_s", 0.0), metrics["time/iteration_s"]
        if snapshot_s > _MUCH * whole_s and not self._snapshot_noted:
            self._snapshot_noted = True
            view.note(
                f"warning: the snapshot for recovery took {snapshot_s:.1f} s beside {whole_s:.1f} s of an iteration: "
                "raise cluster.object_store_bytes where there is memory, or go without by recovery.max_restarts=0"
            )

    def _rescue(self, running: _Running, error: WorkerError | HangError, view: LiveView) -> None:
        """Saves what was learnt before a fault that is one too many."""
        is_saved = self._saved == self._progress.iteration and self._being_written is None
        if not is_fault(error) or running.snapshot is None or is_saved:
            return
        try:
            running.session.replace(error.workers)
            self._restore(running, view)
            self._begin_checkpoint(running.executor, self._folder.checkpoints)
            self._wait_saved(running.executor)
            if self._unwritten is not None:
                raise self._unwritten
            view.note(f"iteration {self._progress.iteration} is saved: go on from there with the same command")
        except RlinfError as another:
            view.note(
                f"nothing could be saved any more ({another}): the same command goes on from the newest checkpoint"
            )

    def _switch(self, running: _Running, view: LiveView) -> None:
        """Goes on under another plan: a checkpoint is the snapshot, and the workers build all stages anew from it."""
        if self._saved != self._progress.iteration:
            self._save(running, view)
        self._settle(running, view)
        self._write_at_last(running, view)
        latest = find_latest(self._folder.checkpoints)
        assert latest is not None
        self._renew(running, latest, view)

    def _renew(self, running: _Running, checkpoint: Path, view: LiveView) -> None:
        """Builds all stages anew from a checkpoint that this run wrote."""
        self._settle(running, view)
        verify(checkpoint)
        self._recovery.repeat("new stages", lambda: self._renewed(running, checkpoint, view), lambda: None)

    def _renewed(self, running: _Running, checkpoint: Path, view: LiveView) -> None:
        running.session.clear()
        running.become(self._start(running.session, checkpoint, checkpoint, view))

    def _evaluate(self, running: _Running, step: int, view: LiveView, label: str) -> Evaluated:
        """Evaluates the learner's present weights on all devices."""
        view.note(f"evaluating {label} ...")
        result = self._safely(running, view, f"evaluation {label}", lambda: self._evaluated(running, step))
        self._note_start(result.spans, view)
        view.note(f"evaluation {label}: {result}")
        return result

    def _evaluated(self, running: _Running, step: int) -> Evaluated:
        self._update(running, running.evaluation, step)
        return running.evaluation.run(step)

    def _check(self, running: _Running, metrics: dict[str, float], view: LiveView) -> None:
        self._safely(running, view, "check", lambda: self._checked(running, metrics, view))

    def _checked(self, running: _Running, metrics: dict[str, float], view: LiveView) -> None:
        """Looks whether the run's goal is reached."""
        progress, checking = self._progress, running.checking
        assert checking is not None
        start = time.time()
        self._update(running, checking, progress.iteration)
        best = progress.best
        result = checking.run(progress.iteration, None if best is None else best["score"])
        if result.score is not None and (best is None or result.score >= best["score"]):
            progress.best = {"score": result.score, "iteration": progress.iteration}
            self._begin_checkpoint(running.executor, self._folder.best)
        progress.checks_s += time.time() - start
        progress.reached = self._job.goal if result.reached and progress.iteration > 0 else None
        said = "; the goal is reached" if progress.reached else ""
        if result.score is None:
            said = "; ended early, it can no longer equal the best"
        else:  # the share of a check that ended early says little
            metrics |= {name.replace("eval/", "check/"): value for name, value in result.metrics().items()}
        view.note(f"check at {progress.iteration}: {result}{said}")

    def _keep_best(self, running: _Running, found: Evaluated, view: LiveView) -> None:
        """Keeps the weights of the best evaluation on the way and after, where no checks of a goal choose the best."""
        progress = self._progress
        best = progress.best_evaluation
        if running.checking is not None or not self._job.eval_every or found.score is None:
            return
        if best is None or found.score >= best["score"]:
            progress.best_evaluation = {"score": found.score, "iteration": progress.iteration}
            write = lambda: self._begin_checkpoint(running.executor, self._folder.best)  # noqa: E731
            self._safely(running, view, "checkpoint", write)
            if self._being_written is not None:
                view.note(f"the best so far is kept: {self._being_written}")

    def _best_folder(self, best: Mapping[str, float]) -> Path:
        return step_folder(self._folder.best, int(best["iteration"]))

    def _forget_best_that_is_gone(self) -> None:
        """Forgets what stayed in the folder of another run, or could not be written."""
        progress = self._progress
        for name in _BEST:
            best = getattr(progress, name)
            if best is not None and not self._best_folder(best).exists():
                setattr(progress, name, None)

    def _return_to_best(self, running: _Running, view: LiveView) -> None:
        """Goes back to the weights of the best check, where the run ended without having reached its goal."""
        progress = self._progress
        if running.checking is None or progress.best is None or self._is_reached() or progress.returned:
            return
        progress.returned = True
        number = int(progress.best["iteration"])
        if number != progress.iteration:
            why = "" if self._job.goal == math.inf else "the goal was not reached: "
            view.note(f"{why}the weights of iteration {number}, the best by checks, are kept")
            self._renew(running, self._best_folder(progress.best), view)
            self._progress = progress  # not that of the checkpoint
        self._save(running, view)

    def _update(self, running: _Running, stages: Evaluating | Checking, step: int) -> None:
        """Sends the learners' weights to those workers of the stages that do not share them."""
        executor = running.executor
        for learner, stage in self._job.copies(stages):
            hosts = executor.workers(learner)
            missing = [(worker, stage) for worker in stages.executor.workers(stage) if worker not in hosts]
            if missing:
                executor.send_weights(running.session, (hosts[0], learner), missing, StepContext(step))

    def _note_start(self, spans: Sequence[Span], view: LiveView) -> None:
        if self._startup.first(spans):
            view.note(str(self._startup))

    # ---------------------------------------------------------------------------------------------------- iterate
    def _iterate(self, running: _Running, writer: MetricsWriter, view: LiveView, stop: StopRequest) -> None:
        config = self._config
        if running.checking and self._progress.best is None and self._goes_on() and not stop.asked:
            self._check(running, {}, view)
        while self._goes_on() and not stop.asked:
            progress = self._progress  # another one after a switch of plans
            progress.returned = False  # a finished run may go on for more iterations
            before, what = progress.global_step, f"iteration {progress.iteration + 1}"
            try:
                result, metrics, seconds = self._safely(running, view, what, lambda: self._transaction(running))
            except DataError:  # there is nothing to learn from any more; what was learnt is kept
                if self._saved != progress.iteration:
                    self._save(running, view)
                raise
            progress = self._progress
            self._note_start(result.spans, view)
            self._account(result, metrics, seconds, before)
            number = progress.iteration
            if self._job.eval_every and number % self._job.eval_every == 0 and number < config.run.num_iterations:
                found = self._evaluate(running, number, view, f"at {number}")
                metrics |= found.metrics()
                self._keep_best(running, found, view)
            if running.checking and (number % self._job.check_every == 0 or number >= config.run.num_iterations):
                self._check(running, metrics, view)
            writer.write(progress.global_step, number, metrics)
            writer.write_samples(progress.global_step, number, self._job.samples(result))
            view.update(number, metrics)
            self._note_snapshot(metrics, view)
            for warning in self._job.warnings(metrics):
                view.note(f"warning: iteration {number}: {warning}")
            due = config.checkpoint.every and number % config.checkpoint.every == 0
            if due or self._unwritten is not None or not self._goes_on():
                self._save(running, view)
            self._replan(running, result, metrics, view, stop)
        if not stop.asked:
            self._return_to_best(running, view)
        elif self._saved != self._progress.iteration:  # before the first iteration too
            self._save(running, view)
        if self._saved is None:  # a run of no iterations leaves the policy that others can start from
            self._save(running, view)

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
        goes_on = self._goes_on() and not stop.asked
        plan, told = self._planning.observe(number, metrics["time/iteration_s"], stages, rounds, goes_on)
        if told:
            view.note(told)
        if plan is not None:
            start = time.time()
            self._planning.write(self._folder)
            self._switch(running, view)
            view.note(f"switched to {plan.name} in {time.time() - start:.1f} s")

    def _goes_on(self) -> bool:
        return self._progress.iteration < self._config.run.num_iterations and not self._is_reached()

    def _is_reached(self) -> bool:
        goal, reached = self._job.goal, self._progress.reached
        return goal is not None and reached is not None and reached >= goal

    def _account(self, result: IterationResult, metrics: dict[str, float], seconds: float, before: int) -> None:
        progress = self._progress
        progress.iteration += 1
        progress.rollout_s += seconds
        self._spans = [*self._spans, *result.spans][-20000:]
        metrics[self._job.speed] = (progress.global_step - before) / seconds
        metrics["time/iteration_s"] = seconds
        metrics["time/total_s"] = progress.rollout_s
        metrics |= stage_seconds(result.spans)

    def _save(self, running: _Running, view: LiveView) -> None:
        write = lambda: self._begin_checkpoint(running.executor, self._folder.checkpoints)  # noqa: E731
        self._safely(running, view, "checkpoint", write)
        if self._being_written is not None:
            self._saved, self._unwritten = self._progress.iteration, None

    def _begin_checkpoint(self, executor: Executor, root: Path) -> None:
        self._wait_saved(executor)
        target = step_folder(root, self._progress.iteration)
        with self._outliving_a_full_disk(target):
            self._job.save(executor, root, self._progress)
            self._being_written = target

    def _wait_saved(self, executor: Executor) -> None:
        """Returns when the checkpoint under way is on the driver's disk; a worker writes it while training goes on."""
        with self._outliving_a_full_disk(self._being_written):
            executor.call(self._job.learner, "wait_saved", StepContext(self._progress.iteration))
            if self._being_written is not None:
                bring_checkpoint(executor, self._job.learner, self._being_written, self._config.checkpoint.keep)
                self._being_written = None

    @contextmanager
    def _outliving_a_full_disk(self, target: Path | None) -> Iterator[None]:
        """A checkpoint that cannot be written ends no training: the next iteration's end tries again."""
        try:
            yield
        except CheckpointWriteError as error:
            _LOG.warning("%s. Training goes on, and tries again after each iteration", error)
            self._being_written, self._saved, self._unwritten = None, None, error
            for name in _BEST:
                best = getattr(self._progress, name)
                if best is not None and self._best_folder(best) == target:
                    setattr(self._progress, name, None)

    def _write_at_last(self, running: _Running, view: LiveView) -> None:
        """Writes what could not be written before, as long as that may help.

        Raises:
            CheckpointWriteError: it cannot be.
        """
        for seconds in _TRY_AGAIN_S:
            if self._unwritten is None:
                return
            time.sleep(seconds)
            self._save(running, view)
            self._settle(running, view)
        if self._unwritten is not None:
            raise self._unwritten

    def _settle(self, running: _Running, view: LiveView) -> None:
        self._safely(running, view, "checkpoint", lambda: self._wait_saved(running.executor))

    @contextmanager
    def _saved_at_last(self, running: _Running, view: LiveView) -> Iterator[None]:
        """Behind it nothing is being written, also where training failed: the run goes on from that checkpoint."""
        try:
            yield
        except HangError:  # whoever would have to answer does not
            raise
        except Exception:
            try:
                self._wait_saved(running.executor)
            except RlinfError as error:  # the worker that writes may be the one that is gone
                _LOG.warning("the newest checkpoint may be the one before: %s", error)
            raise
        self._settle(running, view)
        self._write_at_last(running, view)

    # ----------------------------------------------------------------------------------------------------- finish
    def _digest(self, executor: Executor) -> object:
        step_context = StepContext(self._progress.iteration)
        found = [str(executor.call(stage, "weights_digest", step_context)[0]) for stage in self._job.learners]
        return found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest()

    def _finish(self, executor: Executor, after: Evaluated, digest: object, view: LiveView) -> None:
        progress = self._progress
        assert progress.before is not None
        self._folder.write_json(
            "summary.json",
            {
                "iterations": progress.iteration,
                **self._job.summary(executor, progress, after),
                "before": progress.before,
                "after": after.summary(),
                "rl_s": progress.rollout_s,
                "checks_s": progress.checks_s,
                "best_check": progress.best,
                "best_evaluation": progress.best_evaluation,
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
        checks = f" and {progress.checks_s / 60:.1f} of checks" if progress.checks_s else ""
        view.last_line(f"{last} ({progress.rollout_s / 60:.1f} min of {self._job.work}{checks})")
