"""Learning from transitions as a job: what this workflow brings to training/trainer.py."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import ControlConfig, ControlName, WarmStartConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.control.graph import ENV, LEARNER, REPLAY
from rlinf_embodied.control.recorded import digests, require_recorded
from rlinf_embodied.control.workflow import control_workflow, run_iteration
from rlinf_embodied.embodied.carry_over import driver_part
from rlinf_embodied.embodied.job import SimulatorJob
from rlinf_embodied.embodied.outcome import EvaluationResult, before_and_after
from rlinf_embodied.embodied.policy_check import require_options, require_policy_class
from rlinf_embodied.embodied.policy_folder import PHYSICS, require_conditions, require_policy_folder
from rlinf_embodied.embodied.sizes import require_sizes
from rlinf_embodied.embodied.starting_point import require_env_target
from rlinf_embodied.embodied.warm_start import new_policy
from rlinf_embodied.embodied.warm_start_stage import WarmStartStageConfig
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.learning.checkpoint import load_state
from rlinf_embodied.learning.compiled import require_compiler
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.runtime.discovery import find_cluster
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session, of_type
from rlinf_embodied.telemetry.live import Column
from rlinf_embodied.training.job import Evaluated, Progress
from rlinf_embodied.training.resume import saved_progress
from rlinf_embodied.workflow.graph import Workflow

_DATA = "data"  # in a checkpoint
_CLONES = (ControlName.bc, ControlName.dagger)

_ACTING_COLUMNS = (
    Column("success_once", "rollout/success_once", ".1f", " %", 100.0),
    Column("return", "rollout/return", ".2f"),
)
_CRITIC_COLUMNS = (Column("Q", "losses/q", ".2f"), Column("critic loss", "losses/critic_loss", ".3f"))
_CLONING_COLUMNS = (Column("loss", "losses/imitation_loss", ".4f"),)


class ControlJob(SimulatorJob[ControlConfig]):
    """See `Job`."""

    learner = LEARNER

    def __init__(self, config: ControlConfig) -> None:
        super().__init__(config)
        name = config.algorithm.name
        self.columns = (
            *(_ACTING_COLUMNS if name.acts else ()),
            *(_CLONING_COLUMNS if name in _CLONES else _CRITIC_COLUMNS),
            Column("env steps/s" if name.acts else "updates/s", self.speed, ".0f", after=True),
        )

    def require_checkpoint(self, checkpoint: Path | None) -> None:
        """See Job; a policy that training goes on from was trained under the same conditions.

        Raises:
            ConfigError: the policy's actions are not differentiable, or episodes are to be carried over where they
                cannot be replayed.
            CheckpointError: `data`, or the policy to start from, cannot be used, or is not what it was.
            DataError: `data` is of another env.
        """
        config = self.config
        cluster, start = find_cluster(config.cluster), config.warm_start.checkpoint
        kind = cluster.kind
        require_compiler(config.algorithm.compile, cluster)
        require_env_target(config.env)
        rule = "a checkpoint replays episodes that are under way, and a GPU's simulator cannot"
        replayed = not (config.env.carry_over and config.env.runs_on_gpu(kind))
        require(replayed, "env.carry_over", config.env.carry_over, rule, "use env.backend=batched")
        require_policy_class(config.policy, cloned=False)
        require_options(config.policy)
        needed = "imitation_loss" if config.algorithm.name in _CLONES else "sample"
        rule, kind_of_policy = f"algorithm.name={config.algorithm.name} needs its `{needed}`", config.policy._target_
        found = hasattr(load_target(kind_of_policy), needed)
        require(found, "policy._target_", kind_of_policy, rule, "use policy=soft_actor (docs/control.md)")
        require_recorded(config.files, config.env)
        if checkpoint is not None:
            require_conditions("resume", checkpoint, config.env, config.policy, kind)
            if load_state(checkpoint).get(_DATA) != digests(config.files):
                raise CheckpointError(
                    f"data is {config.data!r}, but what it holds is not what {checkpoint} has learned from: name the "
                    "folder below checkpoints/ in place of latest, or begin anew in another run.dir"
                )
        elif start is not None:
            require_policy_folder("warm_start.checkpoint", start)
            free = ("task", "horizon")
            require_conditions(
                "warm_start.checkpoint", Path(start), config.env, config.policy, kind, free, told=PHYSICS
            )

    def require_staleness(self, staleness: int) -> None:
        """See Job; transitions are of all ages anyhow, and a buffer's state is of one moment."""
        require(
            staleness == 0,
            "plan.max_staleness",
            staleness,
            "rollouts that run ahead are for the workflows that train on them once",
            "use 0",
        )

    def launch_notes(self) -> list[str]:
        """Returns how much is learned from how many env steps."""
        config, algorithm = self.config, self.config.algorithm
        updates = f"updates  {config.updates_per_iteration} of {algorithm.batch_size} transitions"
        if not algorithm.name.acts:
            return [f"{updates} in each iteration, from {config.data} alone"]
        first, expert = config.first_update * config.steps_per_iteration, config.expert_iterations
        acted = f"; the expert acts in the first {expert * config.steps_per_iteration}" if expert else ""
        return [f"{updates} after every {config.steps_per_iteration} env steps, from env step {first} on{acted}"]

    # ------------------------------------------------------------------------------------------------------- stages
    def workflow(self, policy_folder: str) -> Workflow:
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
        """See Job; the global step counts env steps, or where nothing acts updates."""
        result, metrics = run_iteration(executor, progress.iteration)
        progress.global_step += int(metrics.get("rollout/env_steps", metrics["losses/updates"]))
        return result, metrics

    def save(self, executor: Executor, root: Path, progress: Progress) -> None:
        """Has the learner write all state; transitions and running episodes go to it from their own workers."""
        step_context = StepContext(progress.iteration)
        acts = ENV in executor.workflow.stages
        carried = of_type(executor.call(ENV, "export_state", step_context), dict) if acts else []
        state = {"progress": asdict(progress), "config": to_yaml(self.config), _DATA: digests(self.config.files)}
        argument = (str(root), progress.iteration, self.config.checkpoint.keep, driver_part(state, carried))
        executor.call(LEARNER, "save", step_context, argument, executor.publish(REPLAY, "state_part", step_context))

    def load(self, executor: Executor, checkpoint: Path) -> Progress:
        progress = saved_progress(checkpoint)
        step_context = StepContext(progress.iteration)
        for stage in (LEARNER, REPLAY):
            executor.call(stage, "load", step_context, str(checkpoint))
        for edge in executor.workflow.weight_edges:  # copies elsewhere hold the weights, but not their version
            executor.sync_weights(edge.source, edge.target)
        if ENV not in executor.workflow.stages:
            return progress
        carry_over = executor.call(LEARNER, "load_carry_over", step_context, str(checkpoint))[0]
        if carry_over:
            executor.call(ENV, "import_state", step_context, carry_over)
        return progress

    # ------------------------------------------------------------------------------------------------------- finish
    def summary(self, executor: Executor, progress: Progress, after: Evaluated) -> dict[str, object]:
        if self.config.algorithm.name.acts:
            return super().summary(executor, progress, after)
        assert progress.before is not None
        assert isinstance(after, EvaluationResult)
        told = {"num_eval_episodes": len(after.episodes), "updates": progress.global_step}
        return before_and_after(progress.before, after) | told
