"""The job that trains a language model on problems, for training/trainer.py."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config import LanguageSFTConfig, MathConfig, Precision
from rlinf_embodied.config.algorithm import require_correction
from rlinf_embodied.config.checks import require
from rlinf_embodied.data.problems import Split
from rlinf_embodied.device import require_precision
from rlinf_embodied.errors import CheckpointError
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.execution.profiler import ShowProgress
from rlinf_embodied.interfaces.language import LanguagePolicy, RewardModel
from rlinf_embodied.learning.checkpoint import load_state
from rlinf_embodied.planning.pricing import Standing
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.reasoning.batch import in_order
from rlinf_embodied.reasoning.evaluation import AnswerEvaluation, AnswerResult, check_plug_ins, problem_sets
from rlinf_embodied.reasoning.fine_tuning import FINE_TUNING, fine_tuning_workflow, starting_policy
from rlinf_embodied.reasoning.policy_folder import StageConfig
from rlinf_embodied.reasoning.prompt_stage import Position, Prompts
from rlinf_embodied.reasoning.vllm_engine import installed_python
from rlinf_embodied.reasoning.workflow import run_iteration, training_workflow
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import Session, find_cluster
from rlinf_embodied.telemetry.live import Column
from rlinf_embodied.telemetry.metrics import percent
from rlinf_embodied.telemetry.plots import plot_curve
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.telemetry.trace import stage_seconds
from rlinf_embodied.training.job import Evaluated, Progress
from rlinf_embodied.training.resume import load_checkpoint, save_checkpoint
from rlinf_embodied.workflow.graph import Workflow

_PROBLEMS = "problems"  # key of progress.counts: number of problems drawn
_POOLS = "pools/"  # prefix of a Problem.key in progress.counts: 1 if all completions solved it the last time, 0 if none
_TOKENS = Column("tokens/s", "charts/tokens_per_s", ".0f", after=True)
_OF_RL = (
    Column("accuracy", "rollout/accuracy", ".1f", " %", 100.0),
    Column("length", "rollout/length", ".1f"),
    Column("useful groups", "rollout/useful_groups", ".0f", after=True),
    _TOKENS,
)
_OF_FINE_TUNING = (
    Column("loss", "losses/imitation_loss", ".4f"),
    Column("held-out loss", "losses/held_out_loss", ".4f"),
    _TOKENS,
)


class ReasoningJob:
    """Training of a language model, by RL or supervised; Job in training/job.py is the protocol."""

    speed = "charts/tokens_per_s"

    def __init__(self, config: MathConfig) -> None:
        self.config = config
        self._fine_tunes = isinstance(config.algorithm, LanguageSFTConfig)
        self.work, learner = ("fine-tuning", FINE_TUNING) if self._fine_tunes else ("RL", "actor")
        self.learners: tuple[str, ...] = (learner,)
        generation = "generation.step" if config.has_loop else "generation.run"
        self.first_work = f"{FINE_TUNING}.run" if self._fine_tunes else generation
        self.columns = _OF_FINE_TUNING if self._fine_tunes else _OF_RL
        data = config.data
        files = "+".join(Path(file).stem for file in data.files.values())
        source = (data._target_ or "").rpartition(".")[2] or files or data.level.replace(",", "+")
        self.name = f"math-{source}-{'sft' if self._fine_tunes else config.rl.name}"
        self.eval_every = config.eval.every
        self.check_every = 1
        self.cache_dir = config.warm_start.cache_dir
        self._reference = ""  # folder of the policy that the KL divergence is measured from

    def standing(self, cluster: Cluster) -> list[Standing]:
        """Returns nothing: evaluation uses the workers' copies of the model, which are offloaded afterwards."""
        return []

    def planning_parts(self) -> dict[str, object]:
        return {
            n: asdict(getattr(self.config, n))
            for n in ("data", "policy", "generation", "tool", "agent", "episodes", "reward", "algorithm")
        }

    def require_staleness(self, staleness: int) -> None:
        if not self._fine_tunes:
            require_correction(staleness, self.config.rl.tis_cap)
            rule = "problems are chosen by the previous iteration, which has not ended when the next one begins"
            allowed = staleness == 0 or not self.config.data.has_pools
            action = "use 0, or leave out data.solved_share and data.unsolved_share"
            require(allowed, "plan.max_staleness", staleness, rule, action)
            rule = "episodes that are carried over have tokens of several versions"
            allowed = staleness == 0 or not self.config.episodes.carried
            require(allowed, "plan.max_staleness", staleness, rule, "use 0, or episodes.carried=0")

    def require_checkpoint(self, checkpoint: Path | None) -> None:
        """Also checks plug-ins, problems, whether prompts fit the model's context, and the precision.

        Raises:
            ConfigError: one of them cannot be used.
            DataError: a file cannot be used.
        """
        config, start = self.config, checkpoint or self.config.policy.folder or self.config.warm_start.checkpoint
        folder, cluster = None if start is None else Path(start).expanduser(), find_cluster(config.cluster)
        require_precision(config.algorithm.precision, cluster.kind, cluster.device_module)
        size = config.generation.tensor_parallel_size
        numbers = [group.devices_per_node for group in cluster.node_groups() if group.beside is None]
        rule = f"an engine is on one node, and the nodes' numbers of devices, {numbers}, are not multiples of it"
        action = "use a number that divides them, or another cluster.num_devices"
        require(not any(n % size for n in numbers), "generation.tensor_parallel_size", size, rule, action)
        if checkpoint is not None:
            self._reference = str(load_state(checkpoint)["reference"])
            needed = not self._fine_tunes and config.rl.needs_reference and not config.policy.lora.rank
            if needed and not Path(self._reference, "config.json").exists():
                kl_coef, name = config.rl.kl_coef, type(config.rl.loss).__name__
                needs = f"algorithm.kl_coef is {kl_coef}" if kl_coef else f"algorithm.loss is {name}"
                raise CheckpointError(
                    f"{needs}, but the policy that the run started from is no longer in {self._reference!r}: copy it "
                    "to that folder, or begin a new run without this setting"
                )
        key = "policy.folder" if config.policy.folder else "warm_start.checkpoint"
        exists, rule = folder is None or folder.is_dir(), "there is no such folder, as save_pretrained writes it"
        require(exists, key, start, rule, "give one with config.json, model.safetensors and tokenizer.json")
        check_plug_ins(config)
        if config.reward.model is not None and not self._fine_tunes:
            self._require_reward_model(config.reward.model, folder)
        if config.generation.engine == "vllm":
            installed_python()
            fits = cluster.kind == "cpu" or not config.policy.lora.rank or config.policy.precision is Precision.bfloat16
            rule, action = "on GPUs vLLM's kernels for adapters have no float32", "use policy.precision=bfloat16"
            require(fits, "policy.precision", config.policy.precision.value, rule, action)
        model = None if folder is None else str(folder)
        Prompts(config, model, Split.train).batch(0, 1)
        problem_sets(config, model)

    def _require_reward_model(self, model: str, folder: Path | None) -> None:
        """Checks that the reward model can read the policy's prompts and completions."""
        config, policy_class = self.config, cast(type[LanguagePolicy], load_target(self.config.policy._target_))
        codec = policy_class.codec_from_config(config.policy, folder)
        limits = [codec.context_length, config.algorithm.tokens_per_microbatch]
        if config.data.max_prompt_tokens is not None:
            limits.append(config.data.max_prompt_tokens + config.generation.max_new_tokens)
        longest = min(limit for limit in limits if limit is not None)
        model_class = cast(type[RewardModel], load_target(config.reward.model_target))
        model_class.check(Path(model).expanduser(), codec, longest)

    # ------------------------------------------------------------------------------------------------------- stages
    def workflow(self, policy_folder: str, profiled: bool = False) -> Workflow:
        if self._fine_tunes:
            return fine_tuning_workflow(self.config, policy_folder)
        return training_workflow(self.config, policy_folder, self._reference)

    def starting_policy(self, session: Session, cluster: Cluster, progress: ShowProgress) -> Path:
        folder = starting_policy(self.config, session, cluster, progress)
        self._reference = str(folder.resolve())
        return folder

    def prepare(self, executor: Executor, progress: ShowProgress) -> None:
        """Does nothing."""

    def evaluation(self, session: Session, cluster: Cluster, policy_folder: str, folder: RunFolder) -> AnswerEvaluation:
        stage_config = StageConfig(self.config, policy_folder)
        return AnswerEvaluation(stage_config, session, cluster, folder)

    def checking(self, session: Session, cluster: Cluster, policy_folder: str) -> None:
        """Returns None: there is no goal to check."""

    # ---------------------------------------------------------------------------------------------------- iteration
    def run_iteration(self, executor: Executor, progress: Progress) -> tuple[IterationResult, dict[str, float]]:
        """Runs one iteration; global steps are generated tokens, or those of fine-tuning's examples."""
        if self._fine_tunes:
            result = executor.run(StepContext(progress.iteration))
            metrics = result.all_of(FINE_TUNING, dict)[0]
            progress.global_step += int(metrics["losses/tokens"])
            return result, metrics
        counts, per_round = progress.counts, self.config.rl.prompts_per_iteration
        used = counts.get(_PROBLEMS, 0)
        pools = {key.removeprefix(_POOLS): bool(n) for key, n in counts.items() if key.startswith(_POOLS)}
        start = time.perf_counter()
        result, metrics = run_iteration(executor, self.config, progress.iteration, Position(used, pools))
        device_s = (time.perf_counter() - start) * len(executor.plan.devices())
        metrics["charts/tokens_per_s_per_device"] = metrics["rollout/tokens"] / device_s
        actor_s = stage_seconds(result.spans).get("time/actor_s", 0.0) * len(executor.workers("actor"))
        if actor_s and "charts/update_tflop" in metrics:
            metrics["charts/update_tflop_per_s_per_device"] = metrics["charts/update_tflop"] / actor_s
        if actor_s and "charts/update_at_peak_s" in metrics:
            metrics["charts/update_mfu"] = metrics.pop("charts/update_at_peak_s") / actor_s
        for group in in_order(result.all_of("reward", list)) if self.config.data.has_pools else ():
            counts.pop(_POOLS + group.key, None)
            if all(group.correct) or not any(group.correct):
                counts[_POOLS + group.key] = int(group.correct[0])
        counts[_PROBLEMS] = used + int(metrics["rollout/rounds"]) * per_round
        progress.global_step += int(metrics["rollout/tokens"])
        return result, metrics

    def save(self, executor: Executor, root: Path, progress: Progress) -> None:
        """Writes weights and optimizers of learner and critic."""
        learners = (*self.learners, "critic")
        save_checkpoint(executor, root, progress, self.config, learners, state={"reference": self._reference})

    def load(self, executor: Executor, checkpoint: Path) -> None:
        load_checkpoint(executor, checkpoint, (*self.learners, "critic"))

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
        lines = [f"samples  {folder.path / 'samples.md'}", f"curve    {plot_curve(folder.path)}"]
        return lines, f"accuracy before {percent(before, 'accuracy')}, after {after}"
