"""Learning from transitions as a job: what this workflow brings to training/trainer.py."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import ControlConfig, WarmStartConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.control.graph import ENV, LEARNER, REPLAY
from rlinf_embodied.control.replay_stage import REPLAY as REPLAY_FILE
from rlinf_embodied.control.workflow import control_workflow, run_iteration
from rlinf_embodied.embodied.job import SimulatorJob
from rlinf_embodied.embodied.policy_check import require_options, require_policy_class
from rlinf_embodied.embodied.policy_folder import PHYSICS, require_conditions, require_policy_folder
from rlinf_embodied.embodied.sizes import require_sizes
from rlinf_embodied.embodied.starting_point import require_env_target
from rlinf_embodied.embodied.warm_start import new_policy
from rlinf_embodied.embodied.warm_start_stage import WarmStartStageConfig
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.flow.graph import Workflow
from rlinf_embodied.interfaces.policies import ReparameterizedPolicy
from rlinf_embodied.runtime.discovery import find_cluster
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.targets import load_target
from rlinf_embodied.telemetry.live import Column
from rlinf_embodied.training.job import Progress
from rlinf_embodied.training.resume import saved_progress


class ControlJob(SimulatorJob[ControlConfig]):
    """See `Job`."""

    columns = (
        Column("success_once", "rollout/success_once", ".1f", " %", 100.0),
        Column("return", "rollout/return", ".2f"),
        Column("Q", "losses/q", ".2f"),
        Column("entropy coef", "losses/entropy_coef", ".3f"),
        Column("env steps/s", "charts/SPS", ".0f", after=True),
    )
    learner = LEARNER

    def require_checkpoint(self, checkpoint: Path | None) -> None:
        """See Job; a policy that training goes on from was trained under the same conditions.

        Raises:
            ConfigError: the policy's actions are not differentiable, or episodes are to be carried over where they
                cannot be replayed.
        """
        config = self.config
        kind, start = find_cluster(config.cluster).kind, config.warm_start.checkpoint
        require_env_target(config.env)
        rule = "a checkpoint replays episodes that are under way, and a GPU's simulator cannot"
        replayed = not (config.env.carry_over and config.env.runs_on_gpu(kind))
        require(replayed, "env.carry_over", config.env.carry_over, rule, "use env.backend=batched")
        require_policy_class(config.policy, cloned=False)
        require_options(config.policy)
        rule = "SAC climbs its critics through the policy's actions, and this one has no `sample`"
        found = hasattr(load_target(config.policy._target_), "sample") or not hasattr(ReparameterizedPolicy, "sample")
        require(found, "policy._target_", config.policy._target_, rule, "use policy=soft_actor (docs/control.md)")
        if checkpoint is not None:
            require_conditions("resume", checkpoint, config.env, config.policy, kind)
        elif start is not None:
            require_policy_folder("warm_start.checkpoint", start)
            free = ("task", "horizon")
            require_conditions(
                "warm_start.checkpoint", Path(start), config.env, config.policy, kind, free, told=PHYSICS
            )

    def launch_notes(self) -> list[str]:
        """Returns how much is learned from how many env steps."""
        config, algorithm = self.config, self.config.algorithm
        return [
            f"updates  {config.updates_per_iteration} of {algorithm.batch_size} transitions after every "
            f"{config.steps_per_iteration} env steps (algorithm.updates_per_step), from env step "
            f"{config.warmup_iterations * config.steps_per_iteration} on (algorithm.warmup_steps)"
        ]

    # ------------------------------------------------------------------------------------------------------- stages
    def workflow(self, policy_folder: str) -> Workflow:
        """See Job."""
        return control_workflow(self.config, policy_folder)

    def starting_policy(
        self, session: Session, cluster: Cluster, progress: ShowProgress, spare: Path | None = None
    ) -> Path:
        """Returns the checkpoint that is given, or a new policy.

        Raises:
            CheckpointError: the given one is for observations or actions of other sizes.
        """
        config, given = self.config, self.config.warm_start.checkpoint
        if given is not None:
            require_sizes("warm_start.checkpoint", Path(given), config.env, session, cluster)
            return Path(given)
        start = WarmStartConfig(from_nothing=True, cache_dir=config.warm_start.cache_dir)
        stage = WarmStartStageConfig((config.env,), config.policy, start, seed=config.run.seed)
        return new_policy(stage, session, cluster, spare)

    # ---------------------------------------------------------------------------------------------------- iteration
    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        """See Job; the global step counts env steps."""
        result, metrics = run_iteration(executor, progress.iteration)
        progress.global_step += int(metrics["rollout/env_steps"])
        return result, metrics

    def save(self, executor: Executor, root: Path, progress: Progress) -> None:
        """Has the learner write all state; transitions and running episodes go to it from their own workers."""
        step_context = StepContext(progress.iteration)
        parts = [ref for stage in (ENV, REPLAY) for ref in executor.publish(stage, "export_state", step_context)]
        state = {"progress": asdict(progress), "config": to_yaml(self.config)}
        argument = (str(root), progress.iteration, self.config.checkpoint.keep, state, REPLAY_FILE)
        executor.call(LEARNER, "save", step_context, argument, parts)

    def load(self, executor: Executor, checkpoint: Path) -> Progress:
        """See Job."""
        progress = saved_progress(checkpoint)
        step_context = StepContext(progress.iteration)
        for stage in (LEARNER, REPLAY):
            executor.call(stage, "load", step_context, str(checkpoint))
        for edge in executor.workflow.weight_edges:  # copies elsewhere hold the weights, but not their version
            executor.sync_weights(edge.source, edge.target)
        carry_over = executor.call(LEARNER, "load_carry_over", step_context, str(checkpoint))[0]
        if carry_over:
            executor.call(ENV, "import_state", step_context, carry_over)
        return progress
