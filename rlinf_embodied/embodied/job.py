"""Training of a VLA in simulators as a job: what the embodied workflow brings to training/trainer.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import (
    AlgorithmConfig,
    CriticsConfig,
    EnvConfig,
    HierarchyConfig,
    ReplayConfig,
    Reward,
    Source,
    TrainConfig,
)
from rlinf_embodied.config.algorithms import require_correction
from rlinf_embodied.config.checks import require, within
from rlinf_embodied.device import require_precision
from rlinf_embodied.embodied.evaluation import (
    Evaluation,
    EvaluationEnvConfig,
    file_name,
    held_out,
    policy_stage,
)
from rlinf_embodied.embodied.graph import ENV, REPLAY
from rlinf_embodied.embodied.hierarchy import HIGH_FOLDER
from rlinf_embodied.embodied.learner import CARRY_OVER
from rlinf_embodied.embodied.outcome import EvaluationResult, before_and_after, shown
from rlinf_embodied.embodied.policy_check import require_policy_class
from rlinf_embodied.embodied.policy_folder import PHYSICS, is_published, require_conditions, require_policy_folder
from rlinf_embodied.embodied.replay_stage import digests, require_recorded
from rlinf_embodied.embodied.sources import sources_of
from rlinf_embodied.embodied.starting_point import require_env_target, require_start
from rlinf_embodied.embodied.warm_start import starting_high_level, starting_policy
from rlinf_embodied.embodied.workflow import learners_of, run_iteration, training_workflow
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.learning.checkpoint import load_state
from rlinf_embodied.learning.learner_stage import StagePart
from rlinf_embodied.learning.weights import earlier_versions
from rlinf_embodied.planning.pricing import Standing
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session, find_cluster, of_type
from rlinf_embodied.telemetry.live import Column
from rlinf_embodied.telemetry.plots import plot_curve
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.job import Evaluated, Progress
from rlinf_embodied.training.resume import saved_progress
from rlinf_embodied.workflow.graph import StageSpec, Workflow

_DATA = "data"  # in a checkpoint
_REWARDS = {
    Reward.dense: "what the task gives for each step",
    Reward.dense_delta: "how much what the task gives changed in the step",
    Reward.sparse: "nothing for a step",
}


class EmbodiedJob:
    """Training in a simulator by any algorithm, with held-out episodes before, on the way and after; see `Job`."""

    speed = "charts/SPS"
    first_work = "env.step"
    work = "RL"

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.columns = _columns(config.algorithm)
        self._begun_with: tuple[str, str] | None = None  # folders of both policies; None: they are one checkpoint
        self.learner = self.learners[0]
        self.name = file_name(config.env.task)
        self.eval_every = config.eval.every
        self.goal, self.check_every = config.run.until_success, config.eval.check_every
        self.cache_dir = config.warm_start.cache_dir

    def prepare(self, executor: Executor, progress: ShowProgress) -> None:
        """See Job; there is nothing to do."""

    def evaluation(self, session: Session, cluster: Cluster, policy_folder: str, folder: RunFolder) -> Evaluation:
        config = self.config
        videos = str(folder.videos) if config.eval.record_video else None
        asked = held_out(config.env, config.eval, config.run, videos)
        return Evaluation(asked, self.acting("eval_policy", policy_folder, asked), session, cluster)

    def checking(self, session: Session, cluster: Cluster, policy_folder: str) -> Evaluation:
        """The goal is run.until_success."""
        config, given = self.config, self.config.eval
        check = replace(given, seed=given.check_seed, num_episodes=given.check_episodes)
        asked = held_out(config.env, check, config.run)
        return Evaluation(asked, self.acting("check_policy", policy_folder, asked), session, cluster, self.goal)

    def standing(self, cluster: Cluster) -> list[Standing]:
        """Returns the simulators; policies are the copies of the workers' other stages, or leave the device."""
        config = self.config
        if cluster.cores_beside or not config.algorithm.acts:
            return []
        checks = [replace(config.eval, num_episodes=config.eval.check_episodes)] if self.goal is not None else []
        envs = [held_out(config.env, how, config.run).env for how in (config.eval, *checks)]
        return [Standing(ENV, env.num_blocks, env.block_size) for env in envs]

    def samples(self, result: IterationResult) -> list[dict[str, str | float]]:
        """Returns nothing: what this policy does is seen in videos."""
        return []

    # ------------------------------------------------------------------------------------------------------- finish
    def summary(self, executor: Executor, progress: Progress, after: Evaluated) -> dict[str, object]:
        assert progress.before is not None
        assert isinstance(after, EvaluationResult)
        shared = before_and_after(progress.before, after) | {"num_eval_episodes": len(after.episodes)}
        if not self.config.algorithm.acts:
            return shared | {"updates": progress.global_step}
        return {
            **shared,
            "env_steps": progress.global_step,
            "env_steps_per_s": progress.global_step / progress.rollout_s if progress.rollout_s else None,
            "backend": of_type(executor.facts[ENV], EnvSpec)[0].backend,
        }

    def finish(self, folder: RunFolder, before: Mapping[str, object], after: Evaluated) -> tuple[list[str], str]:
        filmed = folder.videos if any(folder.videos.glob("*/*.mp4")) else "none, the env cannot be filmed"
        lines = [f"videos   {filmed if self.config.eval.record_video else 'off'}"]
        lines.append(f"curve    {plot_curve(folder.path)}")
        return lines, f"before {self.work} {shown(before)}; after {after}"

    def require_checkpoint(self, checkpoint: Path | None) -> None:
        """See Job; a policy that training starts from was trained under the same conditions.

        Raises:
            ConfigError: episodes are to be carried over where they cannot be replayed, or the devices do not compute
                in algorithm.precision.
        """
        config, cluster = self.config, find_cluster(self.config.cluster)
        kind = cluster.kind
        require_env_target(config.env)
        require_precision(config.algorithm.precision, kind, cluster.device_module)
        require(
            not (config.env.carry_over and config.env.runs_on_gpu(kind)),
            "env.carry_over",
            config.env.carry_over,
            "a checkpoint replays episodes that are under way, and a GPU's simulator cannot: its resets draw for all "
            "of their rows at once",
            "set env.carry_over=false or env.backend=batched",
        )
        start = config.warm_start
        clones = self._fine_tunes or not (checkpoint or start.checkpoint or start.from_nothing)
        require_policy_class(config.policy, clones)
        if config.hierarchy.on:
            require_precision(config.hierarchy.algorithm.precision, kind, cluster.device_module)
            with within("hierarchy"):
                require_policy_class(config.hierarchy.policy, cloned=False)
        self._require_algorithm()
        if checkpoint is not None:
            require_conditions("resume", checkpoint, config.env, config.policy, kind)
            self._require_same_data(checkpoint)
        elif config.warm_start.checkpoint is not None:
            require_policy_folder("warm_start.checkpoint", config.warm_start.checkpoint)
            folder, free = Path(config.warm_start.checkpoint), ("task", "camera_fov")
            free += ("horizon",) if config.hierarchy.on or config.algorithm.learns_from is Source.transitions else ()
            if not is_published(folder, config.policy):
                acts_in = (folder, config.env, config.policy, kind)
                require_conditions("warm_start.checkpoint", *acts_in, free, logged=PHYSICS)
        else:
            require_start(config)
        if clones:
            sources_of(config)

    def _require_algorithm(self) -> None:
        """Checks that the policy has what the algorithm needs, and that recorded transitions can be used."""
        config, needed = self.config, self.config.algorithm.policy_method
        target, rule = config.policy._target_, f"algorithm={config.algorithm.name} needs its `{needed}`"
        found = hasattr(load_target(target), needed)
        require(found, "policy._target_", target, rule, "use policy=soft_actor (docs/control.md)")
        if not self._fine_tunes:
            require_recorded(config.files, config.env)

    @property
    def _fine_tunes(self) -> bool:
        return self.config.algorithm.learns_from is Source.demonstrations

    def _digests(self) -> list[str]:
        """Returns the SHA-256 of all that is learned from files."""
        return digests(self.config.files)

    def _require_same_data(self, checkpoint: Path) -> None:
        found = self._digests()
        if found and load_state(checkpoint).get(_DATA) != found:
            raise CheckpointError(
                f"data is {self.config.data!r}, but what it holds is not what {checkpoint} has learned from: name the "
                "folder below checkpoints/ in place of latest, bring the files back, or begin anew in another run.dir"
            )

    def require_staleness(self, staleness: int) -> None:
        algorithm = self.config.algorithm
        rule = "transitions of earlier weights are learned from anyhow, and a buffer's state is of one moment"
        fresh = staleness == 0 or algorithm.learns_from is Source.rollouts
        require(fresh, "plan.max_staleness", staleness, rule, "use 0")
        require_correction(staleness, getattr(algorithm, "tis_cap", None))
        rule = "what two levels of policies have sampled is trained on before either changes"
        holds = staleness == 0 or not self.config.hierarchy.on
        require(holds, "plan.max_staleness", staleness, rule, "use 0")

    def planning_parts(self) -> dict[str, object]:
        """Returns env, policy and algorithm; of two levels of policies, the higher one as well."""
        parts: dict[str, object] = {n: asdict(getattr(self.config, n)) for n in ("env", "policy", "algorithm")}
        return parts | ({"hierarchy": asdict(self.config.hierarchy)} if self.config.hierarchy.on else {})

    def launch_notes(self) -> list[str]:
        """Returns what training sees as the reward, or how much is learned from how many transitions."""
        env, algorithm = self.config.env, self.config.algorithm
        if isinstance(algorithm, ReplayConfig):
            return [_updates_note(algorithm, env, self.config.data)]
        bonus = f", and {env.success_bonus:g} more in the last step of an episode that ends solved"
        bonus = bonus if env.success_bonus else ""
        notes = [f"reward   {_REWARDS[env.reward]}{bonus} (env.reward={env.reward.value}, env.success_bonus)"]
        return [*notes, *_levels_note(self.config.hierarchy, env)]

    # ------------------------------------------------------------------------------------------------------- stages
    def acting(self, name: str, policy_folder: str, asked: EvaluationEnvConfig) -> StageSpec:
        """Returns the stage in which the policy of a folder acts, with its high-level one if there is one."""
        config, high_folder = self.config, self._high_folder(policy_folder)
        return policy_stage(name, config.policy, policy_folder, asked, config.hierarchy, high_folder)

    def workflow(self, policy_folder: str) -> Workflow:
        return training_workflow(self.config, policy_folder, self._high_folder(policy_folder))

    def _high_folder(self, policy_folder: str) -> str:
        """Returns the folder of the high-level policy that belongs to the low-level policy's; "" otherwise."""
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
        """Returns the configured checkpoint, a behaviour-cloned policy, or a new policy.

        A high-level policy starts from scratch.
        """
        config = self.config
        low = starting_policy(config, session, cluster, progress, spare)
        if config.hierarchy.on:
            low = low.resolve()  # `latest` may point elsewhere when one that stays as it is is read again
            self._begun_with = (str(low), str(starting_high_level(config, session, cluster, spare)))
        return low

    # ---------------------------------------------------------------------------------------------------- iteration
    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        """The global step counts env steps, or where nothing acts updates."""
        result, metrics = run_iteration(executor, progress.iteration, self.config.run.num_iterations)
        progress.global_step += int(metrics["rollout/env_steps" if self.config.algorithm.acts else "losses/updates"])
        return result, metrics

    def save(self, executor: Executor, root: Path, progress: Progress) -> None:
        """Writes weights and optimizers (the actor's workers do) and the episodes that go on (the env's hold them)."""
        step_context = StepContext(progress.iteration)
        parts = None if executor.ahead is None else executor.ahead.state_before(ENV)
        if parts is None:
            parts = executor.call(ENV, "export_state", step_context) if self.config.algorithm.acts else []
        carried = {name: tensor for part in of_type(parts, dict) for name, tensor in part.items()}
        state: dict[str, object] = {"progress": asdict(progress), "config": to_yaml(self.config)}
        if found := self._digests():
            state[_DATA] = found
        keep = self.config.checkpoint.keep
        argument = (str(root), progress.iteration, keep, StagePart({CARRY_OVER: carried} if carried else {}, state))
        more = [] if executor.ahead is None else executor.ahead.messages(self.learner)
        for other in (*self.learners[1:], *self._replay(executor)):
            more += executor.publish(other, "state_part", step_context)
        executor.call(self.learner, "save", step_context, argument, more)

    def load(self, executor: Executor, checkpoint: Path) -> Progress:
        progress = saved_progress(checkpoint)
        step_context = StepContext(progress.iteration)
        for learner in (*self.learners, *self._replay(executor)):
            executor.call(learner, "load", step_context, str(checkpoint))
        for edge in executor.workflow.weight_edges:  # copies elsewhere hold the weights, but not their version
            executor.sync_weights(edge)
        carry_over = executor.call(self.learner, "load_carry_over", step_context, str(checkpoint))[0]
        if carry_over:
            executor.call(ENV, "import_state", step_context, carry_over)
        if executor.ahead is not None:
            executor.ahead.begin_again_from(
                self.learner, checkpoint, earlier_versions(load_state(checkpoint)), step_context
            )
        return progress

    def _replay(self, executor: Executor) -> tuple[str, ...]:
        return (REPLAY,) if REPLAY in executor.workflow.stages else ()


def _columns(algorithm: AlgorithmConfig) -> tuple[Column, ...]:
    """Returns what the live view shows of an algorithm."""
    acts = (
        Column("success_once", "rollout/success_once", ".1f", " %", 100.0),
        Column("at_end", "rollout/success_at_end", ".1f", " %", 100.0),
        Column("return", "rollout/return", ".2f"),
    )
    losses: tuple[Column, ...] = ()
    if isinstance(algorithm, CriticsConfig):
        losses = (Column("Q", "losses/q", ".2f"), Column("critic loss", "losses/critic_loss", ".3f"))
    elif isinstance(algorithm, ReplayConfig):
        losses = (Column("loss", "losses/imitation_loss", ".4f"),)
    speed = Column("env steps/s" if algorithm.acts else "updates/s", EmbodiedJob.speed, ".0f", after=True)
    return (*(acts if algorithm.acts else ()), *losses, speed)


def _updates_note(algorithm: ReplayConfig, env: EnvConfig, data: str | None) -> str:
    plan = algorithm.schedule(env)
    updates = f"updates  {plan.updates} of {algorithm.batch_size} transitions"
    if not algorithm.acts:
        return f"{updates} in each iteration, from {data} alone"
    expert = plan.expert_iterations * plan.steps
    acted = f"; the expert acts in the first {expert}" if expert else ""
    return f"{updates} after every {plan.steps} env steps, from env step {plan.first_update * plan.steps} on{acted}"


def _levels_note(hierarchy: HierarchyConfig, env: EnvConfig) -> list[str]:
    """Returns a line that says what the high-level policy chooses and how often; no line without such a policy."""
    if not hierarchy.on:
        return []
    what = f"one of {hierarchy.size} instructions" if hierarchy.instructions else f"a goal of {hierarchy.size} numbers"
    stays = "stays as it is" if hierarchy.frozen else "learns, too"
    steps = hierarchy.every * env.executed
    return [f"levels   the higher one chooses {what} every {steps} env steps; the lower one {stays}"]
