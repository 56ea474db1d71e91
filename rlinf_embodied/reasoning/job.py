"""Training of a language model on problems as a job: what the reasoning workflow brings to training/trainer.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.compose import to_yaml
from rlinf_embodied.config import MathConfig
from rlinf_embodied.config.algorithms import require_correction
from rlinf_embodied.data.problems import Split
from rlinf_embodied.data.sources import problem_source
from rlinf_embodied.errors import CheckpointError, ConfigError, DataError
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.learning.checkpoint import load_state
from rlinf_embodied.learning.learner_stage import StagePart
from rlinf_embodied.learning.precision import require_precision
from rlinf_embodied.learning.weights import earlier_versions
from rlinf_embodied.planning.pricing import Standing
from rlinf_embodied.reasoning.batch import ScoredGroup
from rlinf_embodied.reasoning.evaluation import AnswerEvaluation, AnswerResult
from rlinf_embodied.reasoning.fine_tuning import starting_policy
from rlinf_embodied.reasoning.policy_folder import StageConfig, trained_on
from rlinf_embodied.reasoning.prompt_stage import Prompts
from rlinf_embodied.reasoning.reward_stage import reward_function
from rlinf_embodied.reasoning.workflow import run_iteration, training_workflow
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session, find_cluster
from rlinf_embodied.telemetry.live import Column
from rlinf_embodied.telemetry.metrics import percent
from rlinf_embodied.telemetry.plots import plot_curve
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.training.job import Evaluated, Progress
from rlinf_embodied.training.resume import saved_progress
from rlinf_embodied.workflow.graph import Workflow

# counts of the run's progress
_PROBLEMS = "problems"  # used so far
_IDLE = "idle_iterations"  # the last ones in a row without an advantage; absent: none
_MANY_CUT = 0.5  # share of an iteration's completions


class ReasoningJob:
    """See `Job`."""

    columns = (
        Column("accuracy", "rollout/accuracy", ".1f", " %", 100.0),
        Column("length", "rollout/length", ".1f"),
        Column("useful groups", "rollout/useful_groups", ".0f", after=True),
        Column("tokens/s", "charts/tokens_per_s", ".0f", after=True),
    )
    speed = "charts/tokens_per_s"
    learner = "actor"
    first_work = "generation.run"
    work = "RL"

    def __init__(self, config: MathConfig) -> None:
        self.config = config
        data = config.data
        files = "+".join(Path(file).stem for file in data.files.values())
        source = (data._target_ or "").rpartition(".")[2] or files or data.level.replace(",", "+")
        self.name = f"math-{source}-{config.algorithm.name}"
        self.eval_every = config.eval.every
        self.goal: float | None = None  # it runs its iterations
        self.check_every = 1
        self.cache_dir = config.warm_start.cache_dir
        self._left_out: list[str] = []  # which prompts
        self._reference = ""  # folder that the divergence is measured from, once it is known

    @property
    def learners(self) -> tuple[str, ...]:
        """The one."""
        return (self.learner,)

    def standing(self, cluster: Cluster) -> list[Standing]:
        """Returns nothing: answers are made with the workers' copies of the model, which leave the device again."""
        return []

    def planning_parts(self) -> dict[str, object]:
        """Returns the sections that the stages' times depend on."""
        return {n: asdict(getattr(self.config, n)) for n in ("data", "policy", "generation", "reward", "algorithm")}

    def require_staleness(self, staleness: int) -> None:
        require_correction(staleness, self.config.algorithm.tis_cap)

    def launch_notes(self) -> list[str]:
        """Returns what training sees as the reward."""
        reward = self.config.reward
        parts = [f"what {reward._target_} returns" if reward._target_ else "1 for a right answer, 0 for another"]
        parts += [f"{reward.format_reward:g} for the right format"] if reward.format_reward else []
        parts += [f"up to -{reward.overlong_penalty:g} for length"] if reward.overlong_tokens else []
        return [f"reward   {', '.join(parts)} (reward.*)", *self._left_out]

    def require_checkpoint(self, checkpoint: Path | None) -> None:
        """See Job; also checks that problems can be had, and that their prompts fit the model's context.

        Raises:
            ConfigError: they do not fit, there is no such level, what a _target_ names cannot be used, or the devices
                do not compute in algorithm.precision.
            DataError: a file cannot be used.
        """
        config = self.config
        require_precision(config.algorithm.precision, find_cluster(config.cluster))
        if checkpoint is not None:
            self._reference = self._reference_of(checkpoint)
            self._require_reference()
        elif config.policy.folder is not None and not Path(config.policy.folder).expanduser().is_dir():
            raise ConfigError(
                f"policy.folder is {config.policy.folder!r}, but there is no such folder: give one that "
                "save_pretrained wrote (with config.json, model.safetensors and tokenizer.json)"
            )
        given = checkpoint or config.policy.folder or config.warm_start.checkpoint
        if config.warm_start.checkpoint is not None and checkpoint is None:
            trained_on(Path(config.warm_start.checkpoint).expanduser())
        reward_function(config.reward)
        problem_source(config.data, config.run.seed)
        for split, most in ((Split.train, None), (Split.test, config.eval.num_problems)):
            prompts = Prompts.of(config, None if given is None else str(Path(given).expanduser()), split)
            self._left_out += prompts.left_out(most)

    def _reference_of(self, checkpoint: Path) -> str:
        """Returns where the policy is that a run started from: inside its folder it moves with that."""
        saved = Path(str(load_state(checkpoint)["reference"]))
        return str(saved if saved.is_absolute() else checkpoint.resolve().parents[1] / saved)

    def _require_reference(self) -> None:
        if self.config.algorithm.kl_coef and not Path(self._reference, "config.json").exists():
            raise CheckpointError(
                f"algorithm.kl_coef is {self.config.algorithm.kl_coef}, but the policy that the run started from is no "
                f"longer in {self._reference!r}: copy it there, or set algorithm.kl_coef=0"
            )

    # ------------------------------------------------------------------------------------------------------- stages
    def workflow(self, policy_folder: str) -> Workflow:
        return training_workflow(self.config, policy_folder, self._reference)

    def starting_policy(self, session: Session, cluster: Cluster, progress: ShowProgress) -> Path:
        """Returns the folder that is given, or that of a fine-tuned small model."""
        folder = starting_policy(self.config, session, cluster, progress)
        self._reference = str(folder.resolve())
        return folder

    def prepare(self, executor: Executor, progress: ShowProgress) -> None:
        """See Job; there is nothing to do."""

    def evaluation(self, session: Session, cluster: Cluster, policy_folder: str, folder: RunFolder) -> AnswerEvaluation:
        made = StageConfig(self.config, policy_folder)
        return AnswerEvaluation(made, session, cluster, self.config.run.num_iterations)

    def checking(self, session: Session, cluster: Cluster, policy_folder: str) -> None:
        """There is no goal to check."""

    # ---------------------------------------------------------------------------------------------------- iteration
    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        """See Job; the global step counts generated tokens.

        Raises:
            DataError: it was the last of algorithm.max_zero_advantage_iterations in a row, from which nothing could be
                learned; `progress` is left as it was.
        """
        used, per_round = progress.counts.get(_PROBLEMS, 0), self.config.algorithm.prompts_per_iteration
        end = self.config.run.num_iterations
        result, metrics = run_iteration(executor, progress.iteration, used, per_round, end)
        self._count_zero_advantage(progress, metrics)
        rounds = int(metrics["rollout/rounds"])
        progress.counts[_PROBLEMS] = used + rounds * per_round
        progress.global_step += int(metrics["rollout/tokens"])
        return result, metrics

    def _count_zero_advantage(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        if metrics["rollout/useful_groups"]:
            progress.counts.pop(_IDLE, None)
            return
        number, most = progress.counts.get(_IDLE, 0) + 1, self.config.algorithm.max_zero_advantage_iterations
        if most and number >= most:
            right, cut = metrics["rollout/accuracy"], metrics["rollout/truncated"]
            longer = "a larger generation.max_new_tokens, " if cut > _MANY_CUT else ""
            raise DataError(
                f"algorithm.max_zero_advantage_iterations is {most}, but the last {number} iterations trained on "
                f"nothing: no group had completions to tell apart (of the last iteration's {100 * right:.0f} % were "
                f"right, and {100 * cut:.0f} % were cut off at generation.max_new_tokens="
                f"{self.config.generation.max_new_tokens}). Use {longer}problems that are sometimes solved (data), a "
                "larger algorithm.group_size, or another policy; what was learnt is in the newest checkpoint, with "
                "which another run begins by warm_start.checkpoint=<run.dir>/checkpoints/latest"
            )
        progress.counts[_IDLE] = number

    def samples(self, result: IterationResult) -> list[dict[str, str | float]]:
        """Returns the completions of the first prompts, in their order, every `samples.every` iterations."""
        groups: list[ScoredGroup] = [group for report in result.all_of("reward", list) for group in report]
        shown = sorted((group for group in groups if group.shown), key=lambda group: (group.block, group.index))
        return [asdict(sample) for group in shown for sample in group.shown]

    def save(self, executor: Executor, root: Path, progress: Progress) -> None:
        """Writes weights and optimizers of actor and critic."""
        step_context = StepContext(progress.iteration)
        critic = "critic" in executor.workflow.stages
        added = executor.publish("critic", "state_part", step_context) if critic else []
        reference, own = Path(self._reference), root.resolve().parent
        if reference.is_relative_to(own):
            reference = reference.relative_to(own)
        state = {"progress": asdict(progress), "config": to_yaml(self.config), "reference": str(reference)}
        keep = self.config.checkpoint.keep
        argument = (str(root), progress.iteration, keep, StagePart(state=state))
        earlier = [] if executor.ahead is None else executor.ahead.messages("actor")
        executor.call("actor", "save", step_context, argument, [*added, *earlier])

    def load(self, executor: Executor, checkpoint: Path) -> Progress:
        progress = saved_progress(checkpoint)
        step_context = StepContext(progress.iteration)
        for stage in ("actor", "critic"):
            if stage in executor.workflow.stages:
                executor.call(stage, "load", step_context, str(checkpoint))
        for edge in executor.workflow.weight_edges:  # copies elsewhere hold the weights, but not their version
            executor.sync_weights(edge)
        if executor.ahead is not None:
            executor.ahead.begin_again_from("actor", checkpoint, earlier_versions(load_state(checkpoint)), step_context)
        return progress

    # ------------------------------------------------------------------------------------------------------- finish
    def summary(self, executor: Executor, progress: Progress, after: Evaluated) -> dict[str, object]:
        assert progress.before is not None
        assert isinstance(after, AnswerResult)
        return {
            "accuracy_before": progress.before["accuracy"],
            "accuracy_before_interval": progress.before["accuracy_interval"],
            **after.accuracy.summary("accuracy_after"),
            "num_eval_problems": after.accuracy.number,
            "tokens": progress.global_step,
            "tokens_per_s": progress.global_step / progress.rollout_s if progress.rollout_s else None,
            "problems": progress.counts.get(_PROBLEMS, 0),
        }

    def finish(self, folder: RunFolder, before: Mapping[str, object], after: Evaluated) -> tuple[list[str], str]:
        assert isinstance(after, AnswerResult)
        folder.write_text("samples.md", after.table())
        lines = [f"samples  {folder.path / 'samples.md'}", f"curve    {plot_curve(folder.path)}"]
        return lines, f"accuracy before {percent(before, 'accuracy')}, after {after}"
