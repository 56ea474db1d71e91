"""Training of a VLA in simulators as a job: what the embodied workflow brings to training/trainer.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import EnvConfig, EvalConfig, PolicyConfig, Reward, TrainConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.config.learning import require_correction
from rlinf_embodied.embodied.carry_over import driver_part
from rlinf_embodied.embodied.evaluation import (
    Evaluation,
    EvaluationEnvConfig,
    file_name,
    held_out,
    policy_stage,
)
from rlinf_embodied.embodied.graph import ACTOR, ENV
from rlinf_embodied.embodied.hierarchy import HIGH_FOLDER
from rlinf_embodied.embodied.high_level import levels_note, require_high_level, starting_high_level
from rlinf_embodied.embodied.outcome import EvaluationResult, before_and_after, shown
from rlinf_embodied.embodied.policy_check import require_options, require_policy_class
from rlinf_embodied.embodied.policy_folder import PHYSICS, is_published, require_conditions, require_policy_folder
from rlinf_embodied.embodied.report import plot_curve
from rlinf_embodied.embodied.sizes import require_sizes
from rlinf_embodied.embodied.starting_point import require_env_target, require_start
from rlinf_embodied.embodied.warm_start import starting_policy
from rlinf_embodied.embodied.warm_start_source import require_source
from rlinf_embodied.embodied.workflow import learners_of, run_iteration, training_workflow
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.learning.checkpoint import load_state
from rlinf_embodied.learning.compiled import require_compiler
from rlinf_embodied.learning.earlier_weights import earlier_versions
from rlinf_embodied.learning.precision import require_precision
from rlinf_embodied.runtime.discovery import find_cluster
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session, of_type
from rlinf_embodied.telemetry.live import Column
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.job import Evaluated, JobConfig, Progress
from rlinf_embodied.training.resume import saved_progress
from rlinf_embodied.workflow.graph import StageSpec, Workflow

_REWARDS = {
    Reward.dense: "what the task gives for each step",
    Reward.dense_delta: "how much what the task gives changed in the step",
    Reward.sparse: "nothing for a step",
}


class SimulatorJobConfig(JobConfig, Protocol):
    """What trainings in simulators are told alike."""

    env: EnvConfig
    policy: PolicyConfig
    eval: EvalConfig

    @property
    def algorithm(self) -> Learning:
        """How the policy learns."""
        ...

    @property
    def warm_start(self) -> HasCache:
        """What the policy starts from."""
        ...


class Learning(Protocol):
    """What the sections `algorithm` have in common."""

    compile: bool

    @property
    def name(self) -> StrEnum: ...


class HasCache(Protocol):
    """A section that says where the cache is."""

    cache_dir: str


_Config = TypeVar("_Config", bound=SimulatorJobConfig)


class SimulatorJob(Generic[_Config]):
    """What trainings in simulators do alike: held-out episodes before, on the way and after."""

    speed = "charts/SPS"
    first_work = "env.step"
    work = "RL"
    learner: str

    def __init__(self, config: _Config) -> None:
        self.config: _Config = config
        self.name = file_name(config.env.task)
        self.title = f"{config.env.task} · {config.algorithm.name}"
        self.compiles = config.algorithm.compile
        self.eval_every = config.eval.every
        self.goal, self.check_every = config.run.until_success, config.eval.check_every
        self.cache_dir = config.warm_start.cache_dir

    def planning_parts(self) -> dict[str, object]:
        """Returns all of env, policy and algorithm."""
        return {name: asdict(getattr(self.config, name)) for name in ("env", "policy", "algorithm")}

    def prepare(self, executor: Executor, progress: ShowProgress) -> None:
        """See Job; there is nothing to do."""

    def evaluation(self, session: Session, cluster: Cluster, policy_folder: str, folder: RunFolder) -> Evaluation:
        config = self.config
        videos = str(folder.videos) if config.eval.record_video else None
        asked = held_out(config.env, config.eval, config.run.seed, videos)
        return Evaluation(asked, self.acting("eval_policy", policy_folder, asked), session, cluster)

    def acting(self, name: str, policy_folder: str, asked: EvaluationEnvConfig) -> StageSpec:
        """Returns the stage in which the policy of a folder acts."""
        return policy_stage(name, self.config.policy, policy_folder, asked)

    def checking(self, session: Session, cluster: Cluster, policy_folder: str) -> Evaluation:
        """The goal is run.until_success."""
        config, given = self.config, self.config.eval
        check = replace(given, seed=given.check_seed, num_episodes=given.check_episodes)
        asked = held_out(config.env, check, config.run.seed)
        return Evaluation(asked, self.acting("check_policy", policy_folder, asked), session, cluster, self.goal)

    @property
    def learners(self) -> tuple[str, ...]:
        """The one."""
        return (self.learner,)

    def warnings(self, metrics: Mapping[str, float]) -> list[str]:
        """There are none."""
        return []

    def samples(self, result: IterationResult) -> list[dict[str, str | float]]:
        """Returns nothing: what this policy does is seen in videos."""
        return []

    # ------------------------------------------------------------------------------------------------------- finish
    def summary(self, executor: Executor, progress: Progress, after: Evaluated) -> dict[str, object]:
        assert progress.before is not None
        assert isinstance(after, EvaluationResult)
        return {
            **before_and_after(progress.before, after),
            "num_eval_episodes": len(after.episodes),
            "env_steps": progress.global_step,
            "env_steps_per_s": progress.global_step / progress.rollout_s if progress.rollout_s else None,
            "backend": of_type(executor.facts[ENV], EnvSpec)[0].backend,
        }

    def finish(self, folder: RunFolder, before: Mapping[str, object], after: Evaluated) -> tuple[list[str], str]:
        filmed = folder.videos if any(folder.videos.glob("*/*.mp4")) else "none, the env cannot be filmed"
        lines = [f"videos   {filmed if self.config.eval.record_video else 'off'}"]
        lines.append(f"curve    {plot_curve(folder.path)}")
        return lines, f"before RL {shown(before)}; after {after}"


class EmbodiedJob(SimulatorJob[TrainConfig]):
    """See `Job`."""

    columns = (
        Column("success_once", "rollout/success_once", ".1f", " %", 100.0),
        Column("at_end", "rollout/success_at_end", ".1f", " %", 100.0),
        Column("return", "rollout/return", ".2f"),
        Column("env steps/s", "charts/SPS", ".0f", after=True),
    )
    learner = ACTOR

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._begun_with: tuple[str, str] | None = None  # folders of both policies; None: they are one checkpoint
        self.learner = self.learners[0]

    def require_checkpoint(self, checkpoint: Path | None) -> None:
        """See Job; a policy that training goes on from was trained under the same conditions.

        Raises:
            ConfigError: episodes are to be carried over where they cannot be replayed, or the devices do not compute
                in algorithm.precision.
        """
        config, cluster = self.config, find_cluster(self.config.cluster)
        kind = cluster.kind
        require_env_target(config.env)
        require_precision(config.algorithm.precision, cluster)
        require_compiler(config.algorithm.compile, cluster)
        require(
            not (config.env.carry_over and config.env.runs_on_gpu(kind)),
            "env.carry_over",
            config.env.carry_over,
            "a checkpoint replays episodes that are under way, and a GPU's simulator cannot: its resets draw for all "
            "of their rows at once",
            "set env.carry_over=false or env.backend=batched",
        )
        start = config.warm_start
        require_policy_class(config.policy, not (checkpoint or start.checkpoint or start.from_nothing))
        require_options(config.policy)
        if config.hierarchy.on:
            require_precision(config.hierarchy.algorithm.precision, cluster)
            require_compiler(config.hierarchy.algorithm.compile, cluster)
            require_high_level(config.hierarchy, config.env, kind)
        if checkpoint is not None:
            require_conditions("resume", checkpoint, config.env, config.policy, kind)
        elif config.warm_start.checkpoint is not None:
            require_policy_folder("warm_start.checkpoint", config.warm_start.checkpoint)
            folder, free = Path(config.warm_start.checkpoint), ("task", "camera_fov")
            free += ("horizon",) if config.hierarchy.on else ()
            if not is_published(folder, config.policy):
                require_conditions("warm_start.checkpoint", folder, config.env, config.policy, kind, free, told=PHYSICS)
        else:
            require_start(config)
            require_source(config)

    def require_staleness(self, staleness: int) -> None:
        require_correction(staleness, self.config.algorithm.tis_cap)
        rule = "what two levels of policies have sampled is trained on before either changes"
        holds = staleness == 0 or not self.config.hierarchy.on
        require(holds, "plan.max_staleness", staleness, rule, "use 0")

    def planning_parts(self) -> dict[str, object]:
        """Of two levels, the higher one as well."""
        parts = super().planning_parts()
        return parts | ({"hierarchy": asdict(self.config.hierarchy)} if self.config.hierarchy.on else {})

    def launch_notes(self) -> list[str]:
        """Returns what training sees as the reward."""
        env = self.config.env
        bonus = f", and {env.success_bonus:g} more in the last step of an episode that ends solved"
        bonus = bonus if env.success_bonus else ""
        notes = [f"reward   {_REWARDS[env.reward]}{bonus} (env.reward={env.reward.value}, env.success_bonus)"]
        return [*notes, *levels_note(self.config.hierarchy, env)]

    # ------------------------------------------------------------------------------------------------------- stages
    def acting(self, name: str, policy_folder: str, asked: EvaluationEnvConfig) -> StageSpec:
        """Returns the stage in which the policy of a folder acts, with its high-level one if there is one."""
        config, high_folder = self.config, self._high_folder(policy_folder)
        return policy_stage(name, config.policy, policy_folder, asked, config.hierarchy, high_folder)

    def workflow(self, policy_folder: str) -> Workflow:
        return training_workflow(self.config, policy_folder, self._high_folder(policy_folder))

    def _high_folder(self, policy_folder: str) -> str:
        """Returns the folder of the high-level policy that goes with the other's; "" where there is none."""
        if not self.config.hierarchy.on:
            return ""
        low, high = self._begun_with or ("", "")
        return high if policy_folder == low else str(Path(policy_folder) / HIGH_FOLDER)

    @property
    def learners(self) -> tuple[str, ...]:
        return learners_of(self.config.hierarchy)

    def starting_policy(
        self, session: Session, cluster: Cluster, progress: ShowProgress, spare: Path | None = None
    ) -> Path:
        """Returns the checkpoint that is given, a clone of demonstrations, or a new policy.

        A high-level policy begins with the checkpoint that is given for it, or anew.

        Raises:
            CheckpointError: the given one is for observations or actions of other sizes.
        """
        config = self.config
        if config.warm_start.checkpoint is not None:
            folder = Path(config.warm_start.checkpoint)
            if not is_published(folder, config.policy):
                require_sizes("warm_start.checkpoint", folder, config.env, session, cluster)
        low = starting_policy(config, session, cluster, progress, spare)
        if config.hierarchy.on:
            low = low.resolve()  # `latest` may point elsewhere when one that stays as it is is read again
            self._begun_with = (str(low), str(starting_high_level(config, session, cluster, spare)))
        return low

    # ---------------------------------------------------------------------------------------------------- iteration
    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        """The global step counts env steps."""
        result, metrics = run_iteration(executor, progress.iteration, self.config.run.num_iterations)
        progress.global_step += int(metrics["rollout/env_steps"])
        return result, metrics

    def save(self, executor: Executor, root: Path, progress: Progress) -> None:
        """Writes weights and optimizers (the actor's workers do) and the episodes that go on (the env's hold them)."""
        step_context = StepContext(progress.iteration)
        parts = None if executor.ahead is None else executor.ahead.state_before(ENV)
        if parts is None:
            parts = executor.call(ENV, "export_state", step_context)
        state = {"progress": asdict(progress), "config": to_yaml(self.config)}
        keep = self.config.checkpoint.keep
        argument = (str(root), progress.iteration, keep, driver_part(state, of_type(parts, dict)))
        more = [] if executor.ahead is None else executor.ahead.messages(self.learner)
        for other in self.learners[1:]:
            more += executor.publish(other, "state_part", step_context)
        executor.call(self.learner, "save", step_context, argument, more)

    def load(self, executor: Executor, checkpoint: Path) -> Progress:
        progress = saved_progress(checkpoint)
        step_context = StepContext(progress.iteration)
        for learner in self.learners:
            executor.call(learner, "load", step_context, str(checkpoint))
        for edge in executor.workflow.weight_edges:  # copies elsewhere hold the weights, but not their version
            executor.sync_weights(edge.source, edge.target)
        carry_over = executor.call(self.learner, "load_carry_over", step_context, str(checkpoint))[0]
        if carry_over:
            executor.call(ENV, "import_state", step_context, carry_over)
        if executor.ahead is not None:
            executor.ahead.begin_again_from(
                self.learner, checkpoint, earlier_versions(load_state(checkpoint)), step_context
            )
        return progress
