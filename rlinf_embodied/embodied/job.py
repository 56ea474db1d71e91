"""Training of a VLA as a job, in simulators or from demonstrations: what this workflow brings to training/trainer.py.

In supervised fine-tuning nothing acts, and an iteration is an epoch of demonstrations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import AlgorithmConfig, Source, TrainConfig
from rlinf_embodied.config.algorithm import require_correction
from rlinf_embodied.config.checks import require, within
from rlinf_embodied.device import require_precision
from rlinf_embodied.embodied.evaluation import Evaluation, EvaluationEnvConfig, file_name, held_out, policy_stage
from rlinf_embodied.embodied.fine_tuning import demonstrate, fine_tuning_stage, fine_tuning_workflow
from rlinf_embodied.embodied.graph import ENV, REPLAY
from rlinf_embodied.embodied.hierarchy import HIGH_FOLDER
from rlinf_embodied.embodied.outcome import EvaluationResult, mostly_unsolved, shown
from rlinf_embodied.embodied.policy_folder import (
    PHYSICS,
    is_published,
    require_conditions,
    require_policy_class,
    require_policy_folder,
)
from rlinf_embodied.embodied.replay_stage import require_recorded
from rlinf_embodied.embodied.sources import DemonstrationSource, sources_of
from rlinf_embodied.embodied.starting_point import on_cores, require_demonstrations, require_env_target, require_start
from rlinf_embodied.embodied.warm_start import starting_high_level, starting_policy
from rlinf_embodied.embodied.workflow import learners_of, run_iteration, training_workflow
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.interfaces.envs import EnvSpec
from rlinf_embodied.planning.pricing import Standing
from rlinf_embodied.plug_ins import env_options, load_target
from rlinf_embodied.runtime.session import Session, find_cluster, of_type
from rlinf_embodied.telemetry.live import Column
from rlinf_embodied.telemetry.plots import plot_curve
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.job import Evaluated, Progress
from rlinf_embodied.training.resume import load_checkpoint, save_checkpoint
from rlinf_embodied.workflow.graph import StageSpec, Workflow


class EmbodiedJob:
    """Training by any algorithm, with held-out episodes before, on the way and after; see `Job`."""

    speed = "charts/SPS"
    first_work = "env.step"

    def __init__(self, config: TrainConfig) -> None:
        self.config = config = replace(config, env=on_cores(config.env, config.cluster))
        self._fine_tunes = config.algorithm.learns_from is Source.demonstrations
        self.work = "fine-tuning" if self._fine_tunes else "RL"
        self.columns = _columns(config.algorithm)
        self._begun_with: tuple[str, str] | None = None  # folders of both policies; None: they are one checkpoint
        self.learners = learners_of(config.hierarchy)
        self.name = file_name(config.env.task)
        self.eval_every = config.eval.every
        self.check_every = config.eval.check_every
        self.cache_dir = config.warm_start.cache_dir

    @cached_property
    def _sources(self) -> tuple[DemonstrationSource, ...]:
        return sources_of(self.config)

    def prepare(self, executor: Executor, progress: ShowProgress) -> None:
        if self.config.algorithm.uses_demonstrations:
            demonstrate(executor, self._sources, progress)

    def evaluation(self, session: Session, cluster: Cluster, policy_folder: str, folder: RunFolder) -> Evaluation:
        videos = str(folder.videos) if self.config.eval.record_video else None
        asked = held_out(self.config.env, self.config.eval, self.config.run, videos)
        acting, table = self._acting("eval_policy", policy_folder, asked), folder.path / "episodes.csv"
        choose_films = partial(mostly_unsolved, number=self.config.eval.num_videos)
        return Evaluation(asked, acting, session, cluster, table=table, choose_films=choose_films)

    def checking(self, session: Session, cluster: Cluster, policy_folder: str) -> Evaluation | None:
        if (goal := self.config.run.until_success) is None:
            return None
        asked = held_out(self.config.env, self.config.eval.checks, self.config.run)
        return Evaluation(asked, self._acting("check_policy", policy_folder, asked), session, cluster, goal)

    def _acting(self, name: str, policy_folder: str, asked: EvaluationEnvConfig) -> StageSpec:
        config, high_folder = self.config, self._high_folder(policy_folder)
        precisions = (config.algorithm.precision, config.hierarchy.algorithm.precision)
        return policy_stage(name, config.policy, policy_folder, asked, config.hierarchy, high_folder, precisions)

    def standing(self, cluster: Cluster) -> list[Standing]:
        """Returns the simulators; policies are the copies of the workers' other stages, or leave the device."""
        config = self.config
        if cluster.cores_beside or not config.algorithm.acts:
            return []
        checks = [config.eval.checks] if config.run.until_success is not None else []
        envs = [held_out(config.env, how, config.run).env for how in (config.eval, *checks)]
        return [Standing(ENV, env.num_blocks, env.block_size) for env in envs]

    def summary(self, executor: Executor, progress: Progress, after: Evaluated) -> dict[str, object]:
        assert isinstance(after, EvaluationResult)
        number: dict[str, object] = {"num_eval_episodes": len(after.episodes)}
        if not self.config.algorithm.acts:
            return number | {"updates": progress.global_step}
        return number | {
            "env_steps": progress.global_step,
            "env_steps_per_s": progress.global_step / progress.rollout_s if progress.rollout_s else None,
            "backend": of_type(executor.facts[ENV], EnvSpec)[0].backend,
        }

    def finish(self, folder: RunFolder, before: Mapping[str, object], after: Evaluated) -> tuple[list[str], str]:
        filmed = folder.videos if any(folder.videos.glob("*/*.mp4")) else "none, the env cannot be filmed"
        lines = [f"videos   {filmed if self.config.eval.record_video else 'off'}"]
        lines.append(f"curve    {plot_curve(folder.path)}")
        assert isinstance(after, EvaluationResult)
        lines += [f"warning  {text}" for text in after.warnings]
        return lines, f"before {self.work} {shown(before)}; after {after}"

    def require_checkpoint(self, checkpoint: Path | None) -> None:
        """Checks also that a policy which training starts from was trained under the same conditions.

        Raises:
            ConfigError: episodes are to be carried over where they cannot be replayed, or the devices do not compute
                in algorithm.precision.
        """
        config, cluster = self.config, find_cluster(self.config.cluster)
        env, start, kind, hierarchy = config.env, config.warm_start, cluster.kind, config.hierarchy
        require_env_target(env)
        rule = "a checkpoint replays running episodes, and a GPU's simulator cannot: it draws for all rows at once"
        replays, action = not (env.carry_over and env_options(env).on_accelerator(kind)), "set env.carry_over=false"
        require(replays, "env.carry_over", env.carry_over, rule, f"{action}, or env.options.backend=batched")
        clones = self._fine_tunes or not (checkpoint or start.checkpoint or start.from_scratch)
        imitates = clones or config.algorithm.uses_demonstrations
        levels = [("", config.policy, config.algorithm, imitates)]
        levels += [("hierarchy", hierarchy.policy, hierarchy.algorithm, False)] if hierarchy.on else []
        for section, policy, algorithm, cloned in levels:
            with within(section):
                require_precision(algorithm.precision, kind, cluster.device_module)
                require_policy_class(policy, cloned)
                rollouts, rule = algorithm.learns_from is Source.rollouts, f"{policy._target_} has none in closed form"
                coef = getattr(algorithm, "entropy_coef", 0.0) if rollouts else 0.0
                known = getattr(load_target(policy._target_), "has_entropy", True)
                require(known or not coef, "algorithm.entropy_coef", coef, rule, "use 0")
        needed, target = config.algorithm.policy_method, config.policy._target_
        rule = f"algorithm={config.algorithm.name} needs its `{needed}`"
        usable = hasattr(load_target(target), needed)
        require(usable, "policy._target_", target, rule, "use policy=soft_actor (docs/control.md)")
        if config.algorithm.learns_from is Source.transitions:
            require_recorded(config.files, env)
        if checkpoint is not None:
            require_conditions("resume", checkpoint, env, config.policy, kind)
        elif start.checkpoint is not None:
            require_policy_folder("warm_start.checkpoint", start.checkpoint)
            free = (*PHYSICS, "task", "camera_fov")
            free += ("horizon",) if hierarchy.on or config.algorithm.learns_from is Source.transitions else ()
            if not is_published(start.checkpoint, config.policy):
                folder = Path(start.checkpoint)
                require_conditions("warm_start.checkpoint", folder, env, config.policy, kind, free)
        else:
            require_start(config)
        require_demonstrations(config)
        if clones and not self._fine_tunes:
            sources_of(replace(config, data=None))
        if config.algorithm.uses_demonstrations:
            _ = self._sources

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

    def workflow(self, policy_folder: str, profiled: bool = False) -> Workflow:
        config = self.config
        if self._fine_tunes:
            return fine_tuning_workflow(fine_tuning_stage(config, self._sources, policy_folder))
        sources = self._sources if config.algorithm.uses_demonstrations else ()
        if profiled:
            high = config.hierarchy
            if high.on:
                high = replace(high, algorithm=high.algorithm.without_early_stop())
            config = replace(config, algorithm=config.algorithm.without_early_stop(), hierarchy=high)
        return training_workflow(config, policy_folder, self._high_folder(policy_folder), sources)

    def _high_folder(self, policy_folder: str) -> str:
        """Returns the folder of the high-level policy that belongs to the low-level policy's; "" otherwise."""
        if not self.config.hierarchy.on:
            return ""
        low, high = self._begun_with or ("", "")
        return high if policy_folder == low else str(Path(policy_folder) / HIGH_FOLDER)

    def starting_policy(self, session: Session, cluster: Cluster, progress: ShowProgress) -> Path:
        """Returns the configured checkpoint, a behaviour-cloned policy, or a new policy.

        A high-level policy starts from scratch.
        """
        config = self.config
        low = starting_policy(config, session, cluster, progress)
        if config.hierarchy.on:
            low = low.resolve()  # `latest` may point elsewhere when one that stays as it is is read again
            self._begun_with = (str(low), str(starting_high_level(config, session, cluster)))
        return low

    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        """The global step counts env steps, or where nothing acts updates."""
        result, metrics = run_iteration(executor, progress.iteration, self.config.run.num_iterations)
        progress.global_step += int(metrics["rollout/env_steps" if self.config.algorithm.acts else "losses/updates"])
        return result, metrics

    def save(self, executor: Executor, root: Path, progress: Progress) -> None:
        """Writes weights and optimizers, running episodes (the env's workers have them) and the replay buffer."""
        save_checkpoint(executor, root, progress, self.config, self.learners, (ENV, REPLAY))

    def load(self, executor: Executor, checkpoint: Path) -> None:
        load_checkpoint(executor, checkpoint, (*self.learners, REPLAY, ENV))


def _columns(algorithm: AlgorithmConfig) -> tuple[Column, ...]:
    columns: list[Column] = []
    if algorithm.acts:
        columns.append(Column("success_once", "rollout/success_once", ".1f", " %", 100.0))
        columns.append(Column("at_end", "rollout/success_at_end", ".1f", " %", 100.0))
        columns.append(Column("return", "rollout/return", ".2f"))
    if algorithm.has_critic and algorithm.learns_from is Source.transitions:
        columns += [Column("Q", "losses/q", ".2f"), Column("critic loss", "losses/critic_loss", ".3f")]
    elif algorithm.learns_from is not Source.rollouts:
        columns.append(Column("loss", "losses/imitation_loss", ".4f"))
    if algorithm.learns_from is Source.demonstrations:
        columns.append(Column("held-out loss", "losses/held_out_loss", ".3f"))
        columns.append(Column("held-out action error", "losses/held_out_action_error", ".3f"))
    speed = "env steps/s" if algorithm.acts else "updates/s"
    return (*columns, Column(speed, EmbodiedJob.speed, ".0f", after=True))
