"""Supervised fine-tuning as a job: what it brings to training/trainer.py, which does the rest.

An iteration is an epoch.  The goal that is checked is a lower held-out loss, which is never reached: the weights with
the lowest one are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import cast

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import ImitationConfig, WarmStartConfig
from rlinf_embodied.embodied.cloning import HeldOut
from rlinf_embodied.embodied.evaluation import Evaluation, held_out, policy_stage
from rlinf_embodied.embodied.file_checks import require_episodes, require_file
from rlinf_embodied.embodied.held_out import HeldOutCheck, held_out_metrics
from rlinf_embodied.embodied.imitation_stage import EpochReport, ImitationStage, ImitationStageConfig
from rlinf_embodied.embodied.new_policy_stage import NewPolicyStage, UntrainedPolicyStage
from rlinf_embodied.embodied.outcome import EvaluationResult, before_and_after, shown
from rlinf_embodied.embodied.policy_check import require_options, require_policy_class
from rlinf_embodied.embodied.policy_folder import PHYSICS, is_published, require_conditions, require_policy_folder
from rlinf_embodied.embodied.sizes import require_sizes
from rlinf_embodied.embodied.starting_point import require_env_target
from rlinf_embodied.embodied.warm_start_source import Source, file_source
from rlinf_embodied.embodied.warm_start_stage import NUM_DATA_BLOCKS, WarmStartStageConfig
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.learning.checkpoint import load_state
from rlinf_embodied.learning.learner_stage import StagePart
from rlinf_embodied.planning.pricing import Standing
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session, find_cluster, of_type
from rlinf_embodied.telemetry.live import Column
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.job import Evaluated, Progress
from rlinf_embodied.training.resume import saved_progress
from rlinf_embodied.training.warm_start import made_once
from rlinf_embodied.workflow.graph import StageSpec, Workflow

_STAGE, _DATA = "sft", "data"


class ImitationJob:
    """See `Job`."""

    columns = (
        Column("loss", "sft/loss", ".3f"),
        Column("held-out loss", "sft/held_out_loss", ".3f"),
        Column("held-out action error", "sft/held_out_action_error", ".3f"),
        Column("chunks/s", "charts/chunks_per_s", ".0f", after=True),
    )
    speed = "charts/chunks_per_s"
    learner = _STAGE
    first_work = "env.step"
    work = "fine-tuning"
    check_every = 1

    def __init__(self, config: ImitationConfig) -> None:
        self.config = config
        self.name = config.env.task
        self.title = f"{config.env.task} · supervised fine-tuning"
        self.eval_every = config.eval.every
        self.cache_dir = config.warm_start.cache_dir
        self._executor: Executor | None = None  # whose stage learns
        self._filled: Executor | None = None  # whose stage has read its files
        self._is_over = False
        self._progress: ShowProgress = lambda *_: None
        self._found: HeldOut | None = None  # after the newest epoch

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The files, by what they hold."""
        return tuple(file_source(place, _DATA) for place in self.config.files)

    @property
    def goal(self) -> float | None:
        """A loss that cannot be beaten, where checkpoints are chosen by it."""
        stage, kept = self._stage(""), self.config.sft.keep_best
        apart = any(out for block in range(NUM_DATA_BLOCKS) for *_, out in stage.episodes(block))
        return math.inf if kept and apart else None

    @property
    def learners(self) -> tuple[str, ...]:
        """The one."""
        return (self.learner,)

    def standing(self, cluster: Cluster) -> list[Standing]:
        """Returns nothing: what evaluations load is none of the workflow's stages."""
        return []

    def planning_parts(self) -> dict[str, object]:
        """Returns env, policy and how it is fine-tuned."""
        return {name: asdict(getattr(self.config, name)) for name in ("env", "policy", "sft")}

    def require_checkpoint(self, checkpoint: Path | None) -> None:
        """See Job; checks the files; a resumed run must have the files that it began with.

        Raises:
            ConfigError: a file does not fit the env.
            DataError: a file cannot be used.
        """
        config = self.config
        kind = find_cluster(config.cluster).kind
        require_env_target(config.env)
        require_policy_class(config.policy, cloned=True)
        require_options(config.policy)
        number = sum(require_file(place, config.env, _DATA) for place in config.files)
        require_episodes(number, config.data, _DATA)
        if checkpoint is not None:
            require_conditions("resume", checkpoint, config.env, config.policy, kind)
            if load_state(checkpoint).get(_DATA) != self._digests():
                raise CheckpointError(
                    f"data is {config.data!r}, but what it holds is not what {checkpoint} has learned from: bring the "
                    f"files back, or begin anew in another run.dir, with sft.checkpoint={checkpoint}"
                )
        elif config.sft.checkpoint is not None:
            require_policy_folder("sft.checkpoint", config.sft.checkpoint)
            start, free = Path(config.sft.checkpoint), ("task", "camera_fov")
            if not is_published(start, config.policy):
                require_conditions("sft.checkpoint", start, config.env, config.policy, kind, free, told=PHYSICS)

    def _digests(self) -> list[str]:
        return [source.digest for source in self.sources]

    def require_staleness(self, staleness: int) -> None:
        """See Job; it samples nothing."""

    def launch_notes(self) -> list[str]:
        """Returns how many episodes are learned from."""
        stage = self._stage("")
        every = [out for block in range(NUM_DATA_BLOCKS) for *_, out in stage.episodes(block)]
        return [f"data     {len(every) - sum(every)} episodes to learn from, {sum(every)} held out (sft.held_out)"]

    # ------------------------------------------------------------------------------------------------------- stages
    def _stage(self, folder: str) -> ImitationStageConfig:
        config = self.config
        return ImitationStageConfig(config.env, config.policy, config.sft, config.run.seed, self.sources, folder)

    def workflow(self, policy_folder: str) -> Workflow:
        """Returns the graph of one stage."""
        target = f"{ImitationStage.__module__}.ImitationStage"
        stage = StageSpec(_STAGE, target, self._stage(policy_folder), collective=True)
        return Workflow("supervised fine-tuning", NUM_DATA_BLOCKS, {_STAGE: stage})

    def starting_policy(
        self, session: Session, cluster: Cluster, progress: ShowProgress, spare: Path | None = None
    ) -> Path:
        """Returns sft.checkpoint, or the folder of a policy with random or published weights, in the run's folder.

        Raises:
            CheckpointError: the given one is for observations or actions of other sizes.
        """
        config, given = self.config, self.config.sft.checkpoint
        published = given is not None and is_published(given, config.policy)
        if given is not None and not published:
            require_sizes("sft.checkpoint", Path(given), config.env, session, cluster)
            return Path(given)
        assert spare is not None, "a run has a folder"
        start = WarmStartConfig(checkpoint=given)
        plain = WarmStartStageConfig((config.env,), config.policy, start, seed=config.run.seed)
        kind = NewPolicyStage if published else UntrainedPolicyStage
        stage = StageSpec("new policy", f"{kind.__module__}.{kind.__name__}", plain)
        return made_once(spare / "start", stage, 1, session, cluster, lambda executor: None)

    def prepare(self, executor: Executor, progress: ShowProgress) -> None:
        """Has the stage read its files, when the run begins; later on only if there are epochs to come."""
        first = self._executor is None and not self._is_over
        self._executor, self._progress = executor, progress
        if first:
            self._collect(executor)

    def _collect(self, executor: Executor) -> None:
        """Shows the stage all episodes, round by round."""
        total = sum(source.num_episodes or 0 for source in self.sources)
        done = used = 0
        for number in range(max(of_type(executor.call(_STAGE, "open_files", StepContext(0)), int))):
            answers = of_type(executor.call(_STAGE, "collect", StepContext(number)), dict)
            done += sum(answer["episodes"] for answer in answers)
            used += sum(answer["used"] for answer in answers)
            self._progress("demonstrations", done, total, f"{used} used")
        executor.call(_STAGE, "prepare", StepContext(0))
        self._filled = executor

    def evaluation(self, session: Session, cluster: Cluster, policy_folder: str, folder: RunFolder) -> Evaluation:
        config = self.config
        videos = str(folder.videos) if config.eval.record_video else None
        asked = held_out(config.env, config.eval, config.run, videos)
        return Evaluation(asked, policy_stage("eval_policy", config.policy, policy_folder, asked), session, cluster)

    def checking(self, session: Session, cluster: Cluster, policy_folder: str) -> HeldOutCheck:
        """The check is the held-out loss."""
        return HeldOutCheck(_STAGE, self._training(), self._newest)

    # ---------------------------------------------------------------------------------------------------- iteration
    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        """The global step counts chunks that were learned from."""
        self._fill(executor)
        result = executor.run(StepContext(progress.iteration))
        report = result.all_of(_STAGE, EpochReport)[0]
        progress.global_step += report.num_chunks
        metrics = {"sft/loss": report.loss, "charts/learning_rate": report.lr}
        return result, metrics | held_out_metrics(self._measure(executor, progress.iteration))

    def _fill(self, executor: Executor) -> None:
        """Makes rebuilt stages read the files."""
        if self._filled is not executor:
            self._collect(executor)

    def _measure(self, executor: Executor, step: int) -> HeldOut | None:
        """Returns how well the policy imitates held-out episodes now, and keeps the answer."""
        self._fill(executor)
        self._found = cast("HeldOut | None", executor.call(_STAGE, "held_out", StepContext(step))[0])
        return self._found

    def _newest(self, step: int) -> HeldOut:
        """Returns the answer of the newest epoch; before the first one it is asked for."""
        found = self._found or self._measure(self._training(), step)
        assert found is not None, "there are held-out episodes where there is a goal"
        return found

    def _training(self) -> Executor:
        """Returns the executor whose stage learns."""
        assert self._executor is not None, "stages are prepared before they are asked"
        return self._executor

    def warnings(self, metrics: Mapping[str, float]) -> list[str]:
        """There are none."""
        return []

    def samples(self, result: IterationResult) -> list[dict[str, str | float]]:
        """Returns nothing: what this policy does is seen in videos."""
        return []

    def save(self, executor: Executor, root: Path, progress: Progress) -> None:
        """Writes weights, optimizer and what the files hold."""
        state = {"progress": asdict(progress), "config": to_yaml(self.config), _DATA: self._digests()}
        argument = (str(root), progress.iteration, self.config.checkpoint.keep, StagePart(state=state))
        executor.call(_STAGE, "save", StepContext(progress.iteration), argument)

    def load(self, executor: Executor, checkpoint: Path) -> Progress:
        progress = saved_progress(checkpoint)
        executor.call(_STAGE, "load", StepContext(progress.iteration), str(checkpoint))
        self._is_over = progress.iteration >= self.config.sft.num_epochs
        return progress

    # ------------------------------------------------------------------------------------------------------- finish
    def summary(self, executor: Executor, progress: Progress, after: Evaluated) -> dict[str, object]:
        assert progress.before is not None
        assert isinstance(after, EvaluationResult)
        best = progress.best
        return {
            **before_and_after(progress.before, after),
            "num_eval_episodes": len(after.episodes),
            "held_out_loss": None if best is None else -best["score"],
            "chunks": progress.global_step,
        }

    def finish(self, folder: RunFolder, before: Mapping[str, object], after: Evaluated) -> tuple[list[str], str]:
        filmed = folder.videos if any(folder.videos.glob("*/*.mp4")) else "none, the env cannot be filmed"
        lines = [f"videos   {filmed if self.config.eval.record_video else 'off'}"]
        lines.append(f"policy   {folder.checkpoints / 'latest'}")
        return lines, f"before {shown(before)}; after {after}"
