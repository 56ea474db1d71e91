"""One training run of any job, from the configuration to the summary.

prepare   run folder, cluster, session; nothing expensive
start     starting policy or resume -> a policy folder; the plan (planning.py); workers with all stages (running.py)
iterate   the job's iteration -> snapshot, if due -> evaluation or check -> metrics -> checkpoint
          a lost worker is replaced, and the iterations since the newest snapshot are run again (recovery.py)
          if times drift from the prediction, the run switches to another plan between iterations, by a checkpoint
finish    evaluation; summary, trace, curve (account.py)
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from pathlib import Path

from rlinf_embodied import portable
from rlinf_embodied.cache import cache_root
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import ClusterConfig, Exactness
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
from rlinf_embodied.training.account import Account
from rlinf_embodied.training.job import Evaluated, Job, Progress
from rlinf_embodied.training.planning import Planning
from rlinf_embodied.training.recovery import Recovery
from rlinf_embodied.training.resume import checkpoint_to_resume, outliving, saved_progress
from rlinf_embodied.training.running import Running

# calls that plans price separately
_NOT_COMPUTING = (".export_weights", ".install_weights", ".offload", ".onload")


class Trainer:
    """Runs one training."""

    def __init__(
        self, job: Job, started: float | None = None, sessions: Callable[[ClusterConfig], Session] | None = None
    ) -> None:
        """Checks everything that can be checked before anything expensive starts.

        `started` is the time of the command in seconds since the epoch; `sessions` creates another session than the
        config's.

        Raises:
            ConfigError: the run folder cannot be written, is in use by another run, or holds a run with other
                settings; run.exact=portable in a process that is not pinned; run.wandb=true without wandb.
            PlanError: the plan does not fit the cluster.
            CheckpointError: the checkpoint to resume or start from is missing, damaged or of another kind.
        """
        self._job, self._config, self._sessions = job, job.config, sessions
        require_boards(self._config.run)
        self._account = Account(job, started or time.time())
        path = Path(self._config.run.dir or f"runs/{job.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        cache_root(job.cache_dir)  # raises if there is no home directory
        folder = RunFolder(path, locked=True) if path.is_dir() else None  # locked before its checkpoints are read
        try:
            self._resumed, self._note = checkpoint_to_resume(self._config)
            job.require_checkpoint(self._resumed)
            self._cluster: Cluster = find_cluster(self._config.cluster)
            if self._config.run.exact is Exactness.portable and self._cluster.kind == "cpu":
                portable.require()
            progress = Progress() if self._resumed is None else saved_progress(self._resumed)
            self._planning = Planning(job, self._cluster, progress.staleness)
            self._folder = folder or RunFolder(path, locked=True)
        except BaseException:
            if folder is not None:
                folder.unlock()
            raise
        self._first_progress = progress
        self._switched_s = 0.0  # duration of the last switch of plans

    @property
    def folder(self) -> Path:
        return self._folder.path

    def run(self) -> int:
        """Runs the training and returns the exit code: 0; after Ctrl-C or SIGTERM 130 or 143."""
        config, folder, job = self._config, self._folder, self._job
        try:
            folder.write_text("config.yaml", to_yaml(config))
            folder.write_manifest(config.run.seed, self._cluster)
            if self._resumed is not None and self._resumed.parent == folder.checkpoints:
                point_latest(self._resumed)  # its run may have been killed, or newer checkpoints may be damaged
            self._account.startup.mark("command line and imports")
            assert is_dataclass(config)
            with closing((self._sessions or make_session)(config.cluster)) as session:
                self._account.startup.mark("session")
                boards = start_boards(folder.path, config.run, asdict(config))
                self._view = LiveView(config.run.num_iterations, job.columns, folder.path / "console.log")
                with closing(MetricsWriter(folder.path, boards)) as self._writer:
                    if self._note:
                        self._view.note(self._note)
                    return self._run(session)
        finally:
            folder.unlock()

    def _run(self, session: Session) -> int:
        self._start(session)
        running, after = self._running, None
        with ends_when_asked() as stop:
            if running.progress.before is None:
                after = self._evaluate("before")
                running.progress.before = after.summary()
            self._iterate(stop)
        if stop.asked:
            self._planning.report(self._folder)
            self._view.note(f"stopped after iteration {running.progress.iteration}; resume with the same command")
            return stop.exit_code
        if after is None or running.progress.iteration > 0:  # otherwise nothing was trained after it
            after = self._evaluate("after")
            self._keep_best(after)
        digest = self._recovery.repeat("digest", lambda: self._account.weights_digest(running))
        self._account.close(running, self._planning, after, digest, self._view)
        return 0

    def _start(self, session: Session) -> None:
        view, startup, job, progress = self._view, self._account.startup, self._job, self._first_progress
        record = partial(self._folder.append_json, "recoveries.jsonl")
        self._recovery = Recovery(session, self._config.recovery, view.note, self._restore, record, self._regroup)
        self._running = running = Running(job, session, self._folder, progress, view.note)
        if self._resumed is not None:
            running.saved = progress.iteration
            if running.best_folder is not None and not running.best_folder.exists():  # it belongs to another run
                progress.best = None
        repeat, cluster = self._recovery.repeat, self._cluster
        warm_start = lambda: job.starting_policy(session, cluster, view.progress)  # noqa: E731
        policy_folder = self._resumed or repeat("warm start", warm_start, session.clear)
        startup.mark("warm start")
        repeat("profile and plan", lambda: self._choose_plan(session, policy_folder), session.clear)
        startup.mark("profile and plan")
        repeat("set-up of the stages", lambda: self._build_first(policy_folder, self._resumed), session.clear)

    def _choose_plan(self, session: Session, policy_folder: Path) -> None:
        first, folder = self._running.progress.iteration, self._folder
        _, reason = self._planning.choose(str(policy_folder), session, folder, self._view.progress, first)
        self._view.note(reason)

    def _build(self, policy_folder: Path, checkpoint: Path | None, snapshot: snapshots.Snapshot | None = None) -> None:
        """Builds the stages of training and evaluation from a policy folder, then loads a checkpoint or a snapshot."""
        running, job, startup = self._running, self._job, self._account.startup
        if checkpoint is not None:  # stages may be rebuilt from it, or copy its files, after the run has deleted it
            policy_folder = checkpoint = outliving(checkpoint, self._folder.path)
        text = str(policy_folder)
        executor = Executor(job.workflow(text), self._planning.plan, running.session, self._cluster)
        if checkpoint is not None:
            job.load(executor, checkpoint)
        job.prepare(executor, self._view.progress)
        if snapshot is not None:
            snapshots.restore(executor, snapshot)
        startup.mark("stages")
        running.executor, running.policy_folder, running.checkpoint = executor, policy_folder, checkpoint
        running.evaluation = job.evaluation(running.session, self._cluster, text, self._folder)
        running.checking = job.checking(running.session, self._cluster, text)
        running.refresh()
        startup.mark("evaluation stages")

    def _build_first(self, policy_folder: Path, checkpoint: Path | None) -> None:
        """Builds the stages as they are after the current progress, and takes the first snapshot."""
        running, recovery = self._running, self._config.recovery
        self._build(policy_folder, checkpoint)
        if recovery.max_restarts > 0:
            running.pace.share = recovery.snapshot_share
            running.snapshot = None  # stages of another plan may have different states
            running.snapshot_progress = copy.deepcopy(running.progress)
            running.take_snapshot(running.progress)

    def _restore(self) -> None:
        running = self._running
        running.session.clear()  # the remaining workers finish their writes
        running.use_checkpoint()
        self._build(running.policy_folder, running.checkpoint, running.snapshot)
        running.repeat_until(running.progress.iteration)

    def _regroup(self) -> None:
        """Plans for the remaining nodes of the cluster, after a node was lost.

        Raises:
            ConfigError: this node no longer belongs to a cluster.
        """
        self._cluster = find_remaining(self._config.cluster)
        plan = self._planning.move(self._cluster, self._running.progress.iteration)
        under = "" if plan is None else f", under plan {plan.name}"
        self._view.note(f"continuing with {self._cluster.num_devices} devices ({self._cluster.description}){under}")

    def _rebuild(self, checkpoint: Path) -> None:
        """Rebuilds all stages from a checkpoint that this run wrote."""
        verify(checkpoint)

        def build() -> None:
            self._running.session.clear()
            self._build_first(checkpoint, checkpoint)

        self._recovery.repeat("new stages", build, lambda: None)

    def _iterate(self, stop: StopRequest) -> None:
        running = self._running
        if running.checking and running.progress.best is None and self._continues(stop):
            metrics: dict[str, float] = {}
            self._check(metrics)
            if running.progress.iteration == 0:
                self._writer.write(0, 0, metrics)
        while self._continues(stop):
            self._iteration(stop)
        if not stop.asked:
            self._return_to_best()
        if stop.asked or running.saved is None:  # a run without iterations saves its policy, too
            self._save()

    def _iteration(self, stop: StopRequest) -> None:
        """Runs an iteration; evaluates, checks, writes metrics and saves, as due."""
        config, running, job = self._config, self._running, self._job
        progress = running.progress  # the iteration replaces it by a copy
        progress.returned = False  # a finished run may be resumed for more iterations
        before = progress.global_step
        result, metrics, seconds = self._recovery.repeat(f"iteration {progress.iteration + 1}", self._transaction)
        progress = running.progress
        self._account.note_start(result.spans, self._view)
        self._account.add(progress, result, metrics, seconds, before)
        number, last = progress.iteration, config.run.num_iterations
        if job.eval_every and number % job.eval_every == 0 and number < last:
            evaluated = self._evaluate(f"at {number}")
            metrics |= evaluated.metrics()
            self._keep_best(evaluated)
        if running.checking and (number % job.check_every == 0 or number >= last):
            self._check(metrics)
        self._writer.write(progress.global_step, number, metrics)
        self._view.update(number, metrics)
        if (config.checkpoint.every and number % config.checkpoint.every == 0) or not self._continues():
            self._save()
        self._replan(result, metrics, last - number if self._continues(stop) else 0)

    def _transaction(self) -> tuple[IterationResult, dict[str, float], float]:
        """Runs an iteration; returns its result, metrics and seconds.  The progress changes only after it has ended."""
        running = self._running
        progress = copy.deepcopy(running.progress)
        progress.staleness = running.executor.plan.staleness
        start = time.time()
        result, metrics = self._job.run_iteration(running.executor, progress)
        seconds = time.time() - start
        if running.takes_snapshots and running.pace.is_due(seconds):
            metrics["time/snapshot_s"] = running.take_snapshot(replace(progress, iteration=progress.iteration + 1))
        running.progress = progress
        return result, metrics, seconds

    def _continues(self, stop: StopRequest | None = None) -> bool:
        return not self._running.is_over and not (stop and stop.asked)

    def _save(self) -> None:
        self._recovery.repeat("checkpoint", self._running.save)

    def _replan(self, result: IterationResult, metrics: Mapping[str, float], remaining: int) -> None:
        """Compares the iteration with its prediction, and switches to another plan if that saves time."""
        executor = self._running.executor
        computing = stage_seconds([span for span in result.spans if not span.name.endswith(_NOT_COMPUTING)])
        stages = {name: computing[f"time/{name}_s"] for name in executor.workflow.stages}
        rounds = executor.workflow.rounds(result.reports)
        number, switch_s = self._running.progress.iteration - 1, max(self._switched_s, executor.setup_s)
        plan, note = self._planning.observe(
            number, metrics["time/iteration_s"], stages, rounds, remaining=remaining, switch_s=switch_s
        )
        if note:
            self._view.note(note)
        if plan is not None:
            start = time.time()
            self._planning.write(self._folder)
            self._save()  # the stages are rebuilt from this checkpoint
            latest = find_latest(self._folder.checkpoints)
            assert latest is not None
            self._rebuild(latest)
            self._switched_s = time.time() - start
            self._view.note(f"switched to {plan.name} in {self._switched_s:.1f} s")

    def _evaluate(self, label: str) -> Evaluated:
        self._view.note(f"evaluating {label} ...")
        last = label == "after" or not self._job.config.run.num_iterations  # then it is the only one
        result = self._recovery.repeat(f"evaluation {label}", lambda: self._running.evaluate(last))
        self._view.note(f"evaluation {label}: {result}")
        self._account.note_start(result.spans, self._view)
        progress = self._running.progress
        self._writer.show_videos(progress.global_step, self._folder.videos / f"step_{progress.iteration}")
        return result

    def _keep_best(self, result: Evaluated) -> None:
        """Keeps the weights of the best evaluation, unless checks of a goal choose the best weights."""
        running = self._running
        if running.checking is not None or not self._job.eval_every:
            return
        if self._recovery.repeat("checkpoint", lambda: running.keep_best(result)):
            self._view.note(f"the best weights so far are kept in {running.best_folder}")

    def _check(self, metrics: dict[str, float]) -> None:
        """Checks whether the run's goal is reached, and adds the result to an iteration's metrics."""
        result = self._recovery.repeat("check", self._running.check)
        remark = "; the goal is reached" if self._running.progress.reached else ""
        metrics |= {name.replace("eval/", "check/"): value for name, value in result.metrics().items()}
        if result.score is None:
            remark = "; ended early, it can no longer equal the best"
        if self._running.is_stalled:
            best, patience = self._running.progress.best, self._config.run.patience
            assert best is not None
            remark += f"; {patience} checks in a row were no better than that of iteration {best['iteration']:.0f}"
        self._view.note(f"check at {self._running.progress.iteration}: {result}{remark}")

    def _return_to_best(self) -> None:
        """Restores the weights of the best check if the run ended without reaching its goal."""
        running, progress, best = self._running, self._running.progress, self._running.best_folder
        if running.checking is None or best is None or running.is_reached or progress.returned:
            return
        progress.returned = True
        assert progress.best is not None
        number = int(progress.best["iteration"])
        if number != progress.iteration:
            self._view.note(
                f"the goal was not reached: the run keeps the weights of iteration {number}, the best check"
            )
            self._rebuild(best)
        running.saved = None  # the newest checkpoint has other weights, or another value of progress.returned
        self._save()
