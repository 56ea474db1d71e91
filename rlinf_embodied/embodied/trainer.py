"""One training run, from the configuration to the summary.

prepare   run folder, cluster, session                    nothing expensive has started
start     warm start or resume -> a policy folder; the plan (planning.py); workers with all stages; evaluation before
iterate   run_iteration -> metrics -> checkpoint          an iteration is the transaction: what dies in it is lost
          times that drift from the prediction -> another plan, from a checkpoint, at the iteration's border
finish    evaluation after, with videos; summary, trace, curve
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from rlinf_embodied.cluster.hardware import Cluster, cluster_at_hand
from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.evaluation import (
    Evaluation,
    EvaluationPolicyConfig,
    EvaluationResult,
    evaluation_env,
)
from rlinf_embodied.embodied.interrupt import INTERRUPTED, StopRequest, stop_on_interrupt
from rlinf_embodied.embodied.planning import Planning
from rlinf_embodied.embodied.report import plot_curve
from rlinf_embodied.embodied.resume import Progress, checkpoint_to_resume, load, save, saved_progress
from rlinf_embodied.embodied.warm_start import starting_policy
from rlinf_embodied.embodied.workflow import run_iteration, training_workflow
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.flow.graph import StageSpec
from rlinf_embodied.flow.plan import Plan
from rlinf_embodied.interfaces import EnvSpec
from rlinf_embodied.learning.checkpoint import find_latest
from rlinf_embodied.runtime import transport
from rlinf_embodied.runtime.host import Tick
from rlinf_embodied.runtime.session import Session, of_type
from rlinf_embodied.runtime.sessions import make_session
from rlinf_embodied.telemetry.live import LiveView
from rlinf_embodied.telemetry.metrics import MetricsWriter
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.telemetry.startup import StartupClock
from rlinf_embodied.telemetry.trace import Span, stage_seconds, write_trace

# what a stage does beside its calls; plans price it apart from them
_NOT_COMPUTING = (".export_weights", ".install_weights", ".offload", ".onload")


@dataclass(slots=True)
class _Running:
    """The stages that are up: they change with the plan, the workers stay."""

    session: Session
    executor: Executor
    evaluation: Evaluation


class Trainer:
    """Runs one training; `run` is the whole story."""

    def __init__(self, config: TrainConfig, started: float | None = None) -> None:
        """Checks what can be checked before anything expensive starts.

        Raises:
            ConfigError: the run folder cannot be written, or is in use and resume=never.
            PlanError: the plan does not fit the cluster.
            CheckpointError: the checkpoint to resume from, or to start from, is missing, damaged or foreign.
        """
        self._config = config
        self._started = started or time.time()
        self._startup = StartupClock(self._started)
        self._resumed = checkpoint_to_resume(config)
        self._folder = RunFolder(Path(config.run.dir or _default_dir(config)))
        self._cluster: Cluster = cluster_at_hand(config.cluster)
        self._planning = Planning(config, self._cluster, training_workflow(config, ""))
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
        try:
            writer = MetricsWriter(self._folder.path, wandb=config.run.wandb, config=asdict(config))
            try:
                with LiveView(config.run.num_iterations, f"{config.env.task} · {config.algorithm.name}") as view:
                    return self._run(session, writer, view)
            finally:
                writer.close()
        finally:
            session.close()

    def _run(self, session: Session, writer: MetricsWriter, view: LiveView) -> int:
        policy_folder = self._resumed or starting_policy(self._config, session, self._cluster, view.progress)
        self._startup.mark("warm start")
        plan = self._choose_plan(session, policy_folder, view)
        running = self._start(session, plan, policy_folder, self._resumed, view)
        with stop_on_interrupt() as stop:
            if self._progress.success_before is None:
                before = self._evaluate(running, 0, view, "before")
                self._progress.success_before = before.summary()
            self._iterate(running, writer, view, stop)
        if stop.asked:
            self._planning.report(self._folder)
            view.note(f"stopped after iteration {self._progress.iteration}; resume with the same command")
            return INTERRUPTED
        after = self._evaluate(running, self._config.run.num_iterations, view, "after")
        self._finish(running.executor, after, view)
        return 0

    def _choose_plan(self, session: Session, policy_folder: Path, view: LiveView) -> Plan:
        workflow = training_workflow(self._config, str(policy_folder))
        first = 0 if self._resumed is None else saved_progress(self._resumed).iteration
        plan, why = self._planning.choose(workflow, session, self._folder, view.progress, first)
        view.note(why)
        self._startup.mark("profile and plan")
        return plan

    def _start(
        self, session: Session, plan: Plan, policy_folder: Path, checkpoint: Path | None, view: LiveView
    ) -> _Running:
        """Builds the stages of training and evaluation from a policy folder, and loads a checkpoint's other state."""
        executor = Executor(training_workflow(self._config, str(policy_folder)), plan, session, self._cluster)
        routes = transport.with_bytes(executor.routes, self._planning.edge_bytes_per_item)
        self._folder.write_json("transports.json", [route.to_dict() for route in routes])
        view.note(f"transports\n{transport.table(routes)}")
        if checkpoint is not None:
            self._progress = load(executor, checkpoint)
            self._saved = self._progress.iteration
        self._startup.mark("stages", executor.setup_s)
        evaluation = self._evaluation(session, str(policy_folder))
        self._startup.mark("evaluation stages")
        return _Running(session, executor, evaluation)

    def _switch(self, running: _Running, plan: Plan, view: LiveView) -> None:
        """Goes on under another plan: a checkpoint is the snapshot, and the workers build all stages anew from it."""
        if self._saved != self._progress.iteration:
            self._save(running.executor)
        latest = find_latest(self._folder.checkpoints)
        assert latest is not None
        running.session.clear()
        started = self._start(running.session, plan, latest, latest, view)
        running.executor, running.evaluation = started.executor, started.evaluation

    def _evaluation(self, session: Session, policy_folder: str) -> Evaluation:
        config = self._config
        env = evaluation_env(config.env, min(config.eval.num_envs, config.eval.num_episodes))
        policy = EvaluationPolicyConfig(
            config.policy, policy_folder, config.run.seed, env.block_size, config.eval, env.num_envs
        )
        stage = StageSpec("eval_policy", "rlinf_embodied.embodied.evaluation.EvaluationPolicyStage", policy)
        videos = str(self._folder.videos) if config.eval.record_video else None
        return Evaluation(env, config.eval, stage, session, self._cluster, config.run.seed, videos)

    def _evaluate(self, running: _Running, step: int, view: LiveView, label: str) -> EvaluationResult:
        """Evaluates the actor's present weights on all devices."""
        view.note(f"evaluating {label} ({self._config.eval.num_episodes} held-out episodes) ...")
        executor, evaluation = running.executor, running.evaluation
        hosts = executor.workers("actor")
        missing = [(worker, "eval_policy") for worker in evaluation.workers if worker not in hosts]
        if missing:
            executor.send_weights(running.session, (hosts[0], "actor"), missing, Tick(step))
        result = evaluation.run(step)
        self._note_start(result.spans, view)
        view.note(f"evaluation {label}: success {result}")
        return result

    def _note_start(self, spans: Sequence[Span], view: LiveView) -> None:
        if self._startup.first_step(spans):
            view.note(str(self._startup))

    # ---------------------------------------------------------------------------------------------------- iterate
    def _iterate(self, running: _Running, writer: MetricsWriter, view: LiveView, stop: StopRequest) -> None:
        config = self._config
        while self._progress.iteration < config.run.num_iterations and not stop.asked:
            start = time.time()
            result, metrics = run_iteration(running.executor, self._progress.iteration)
            seconds = time.time() - start
            self._note_start(result.spans, view)
            self._account(result, metrics, seconds)
            number = self._progress.iteration
            if config.eval.every and number % config.eval.every == 0 and number < config.run.num_iterations:
                evaluated = self._evaluate(running, number, view, f"at {number}")
                metrics |= {"eval/success_once": evaluated.success_once, "eval/return": evaluated.mean_return}
            writer.write(self._progress.env_steps, number, metrics)
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

    def _account(self, result: IterationResult, metrics: dict[str, float], seconds: float) -> None:
        progress = self._progress
        progress.iteration += 1
        progress.env_steps += int(metrics["rollout/env_steps"])
        progress.rollout_s += seconds
        self._spans = [*self._spans, *result.spans][-20000:]
        metrics["charts/SPS"] = metrics["rollout/env_steps"] / seconds
        metrics["time/iteration_s"] = seconds
        metrics["time/total_s"] = progress.rollout_s
        metrics |= stage_seconds(result.spans)

    def _save(self, executor: Executor) -> None:
        save(executor, self._folder.checkpoints, self._progress, self._config)
        self._saved = self._progress.iteration

    # ----------------------------------------------------------------------------------------------------- finish
    def _finish(self, executor: Executor, after: EvaluationResult, view: LiveView) -> None:
        config, progress = self._config, self._progress
        digest = executor.call("actor", "weights_digest", Tick(progress.iteration))[0]
        before = progress.success_before
        assert before is not None
        iterations = max(1, progress.iteration)
        self._folder.write_json(
            "summary.json",
            {
                "iterations": progress.iteration,
                "success_rate_before": before["success_once"],
                "success_rate_before_interval": before["success_once_interval"],
                "success_rate_after": after.success_once,
                "success_rate_after_interval": list(after.interval),
                "num_eval_episodes": len(after.episodes),
                "before": before,
                "after": after.summary(),
                "env_steps": progress.env_steps,
                "env_steps_per_s": progress.env_steps / progress.rollout_s if progress.rollout_s else None,
                "rl_s": progress.rollout_s,
                "wall_s": time.time() - self._started,
                "startup_s": self._startup.phases | {"first env step": self._startup.total_s},
                "plan": self._planning.plan.name,
                "predicted_s_per_iteration": self._planning.predicted_s,
                "measured_s_per_iteration": progress.rollout_s / iterations,
                "weights_sha256": digest,
                "backend": of_type(executor.facts["env"], EnvSpec)[0].backend,
            },
        )
        write_trace(self._folder.path / "trace.json", self._spans)
        curve = plot_curve(self._folder.path)
        view.note(self._planning.report(self._folder))
        view.note(f"videos   {self._folder.videos}" if config.eval.record_video else "videos   off")
        view.note(f"curve    {curve}")
        view.note(f"summary  {self._folder.path / 'summary.json'}")
        success, (low, high) = before["success_once"], cast("list[float]", before["success_once_interval"])
        view.last_line(
            f"success before {100 * cast(float, success):.1f} % [{100 * low:.1f}, {100 * high:.1f}], "
            f"after {after} ({progress.rollout_s / 60:.1f} min of RL)"
        )


def _default_dir(config: TrainConfig) -> str:
    return f"runs/{config.env.task}-{config.algorithm.name}-{time.strftime('%Y%m%d-%H%M%S')}"
