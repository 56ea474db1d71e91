"""The reasoning workflow: its graph, and what one iteration is, top to bottom.

prompts -> generation -> reward ---------------------+-> actor ~~> generation, old_log_probs: new weights
              |            |                         |
              +------------+-> critic    (PPO) ------+     values, advantages, its own update
              +-> old_log_probs (several steps) -----+     log-probs of training's code under the weights that sampled
              +-> reference (kl_coef > 0) -----------+     log-probs under the starting policy

With dynamic sampling all stages before the actor are repeated, with further problems, until enough groups differ.

run_iteration                driver     every step of the plan, then metrics of the results
  PromptStage.run            worker     problems from the training stream, by position
  GenerationStage.run        worker     continuous batching over a set of blocks; a block is handed on when it has ended
  RewardStage.run            worker     right or wrong; math-verify in separate processes where texts do not decide
  LogProbStage.run           worker     only where the algorithm needs it
  CriticStage.run            worker     only for PPO
  ActorStage.run             worker     advantages, microbatches by tokens, gradients summed over blocks, the step
  Executor.sync_weights      driver     version and checksum, only to workers without an actor
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from rlinf_embodied.config import MathConfig, ReasoningName, Sharding
from rlinf_embodied.errors import DataError
from rlinf_embodied.execution.ahead import Follow
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.reasoning.actor_stage import ActorReport, ActorStageConfig
from rlinf_embodied.reasoning.batch import GenerationReport, RewardReport
from rlinf_embodied.reasoning.critic_stage import CriticReport, CriticStageConfig
from rlinf_embodied.reasoning.generation_stage import GenerationStageConfig, LanguageStageConfig
from rlinf_embodied.reasoning.graph import reasoning_graph, resample
from rlinf_embodied.reasoning.logprob_stage import LogProbStageConfig
from rlinf_embodied.reasoning.prompt_stage import Limit, PromptStageConfig, engine_limits
from rlinf_embodied.reasoning.reward_stage import RewardStageConfig
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import of_type
from rlinf_embodied.workflow.graph import RepeatDecision, Workflow


def training_workflow(config: MathConfig, policy_folder: str, reference_folder: str = "") -> Workflow:
    """Returns the graph.

    Args:
        config: of the job.
        policy_folder: what every copy of the policy starts from.
        reference_folder: what the divergence is measured from; "": the same.
    """
    algorithm = config.algorithm
    ppo = algorithm.name is ReasoningName.ppo
    old_log_probs, reference = algorithm.num_steps > 1, algorithm.kl_coef > 0
    sources = ["generation", "reward"]
    sources += ["old_log_probs"] * old_log_probs + ["reference"] * reference + ["critic"] * ppo
    # a sharded actor's pass is made by all of its workers together, and they get chunks of unequal size
    sharded = algorithm.sharding is not Sharding.none
    streams = not (algorithm.num_steps > 1 or algorithm.dynamic_sampling or ppo or sharded)
    sampling_filter = DynamicSamplingFilter(algorithm.prompts_per_iteration, 1 + algorithm.max_resamples)
    graph = reasoning_graph(
        ("prompts", *sources, "actor"),
        config.num_blocks,
        streams=streams,
        items_per_block=config.rows_per_block,
        blocks_per_batch=config.blocks_per_batch,
        repeat=resample(sampling_filter, 1 + algorithm.max_resamples) if algorithm.dynamic_sampling else None,
        configs=_configs(config, policy_folder, reference_folder or policy_folder, tuple(sources)),
        waiting=("reward",) if config.reward.waits else (),
    )
    return replace(graph, typical_iteration=algorithm.critic_warmup_iterations if ppo else 0)


def _configs(config: MathConfig, folder: str, reference: str, sources: tuple[str, ...]) -> dict[str, object]:
    """Returns the configs of all stages that there may be; `sources` feed the actor."""
    data, generation, algorithm, seed = config.data, config.generation, config.algorithm, config.run.seed
    model = LanguageStageConfig(config.policy, folder, seed)
    frozen = LanguageStageConfig(config.policy, reference, seed, share="reference")
    limits = training_limits(config)
    read = (generation.temperature, algorithm.tokens_per_microbatch, algorithm.precision)
    return {
        "prompts": PromptStageConfig(
            *(data, config.policy, folder, seed, config.prompts_per_block, config.blocks_per_batch, limits),
            generation.max_new_tokens,
        ),
        "generation": GenerationStageConfig(model, generation, algorithm.group_size),
        "reward": RewardStageConfig(config.reward, data.prompt_template, generation.max_new_tokens, config.samples),
        "old_log_probs": LogProbStageConfig(model, *read, proximal=True),
        "reference": LogProbStageConfig(frozen, *read),
        "critic": CriticStageConfig(config.policy, folder, seed, algorithm),
        "actor": ActorStageConfig(model, config, sources),
    }


def training_limits(config: MathConfig) -> tuple[Limit, ...]:
    """Returns what limits prompts for training, beyond the model's context."""
    budget, new_tokens = config.algorithm.tokens_per_microbatch, config.generation.max_new_tokens
    budget_limit = Limit(budget, f"algorithm.tokens_per_microbatch is {budget}", new_tokens)
    return (budget_limit, *engine_limits(config.generation, config.generation.engine))


# ----------------------------------------------------------------------------------------------------- dynamic sampling
class DynamicSamplingFilter:
    """Dynamic sampling (DAPO, arXiv 2503.14476): keeps groups whose members differ in the raw metric.

    The message to the actor is the (round, block, group) triples to train on: the first ones with nonzero variance.
    """

    def __init__(self, wanted: int, max_rounds: int) -> None:
        """Takes how many groups an iteration trains on, and after how many rounds it continues with fewer."""
        self._wanted, self._max_rounds = wanted, max_rounds

    def __call__(self, rounds: Sequence[Sequence[object]]) -> RepeatDecision:
        """Returns whether enough groups have nonzero variance, and which to train on.

        Raises:
            DataError: the last round is over, and not a single group differs.
        """
        found = [
            (number, group)
            for number, reports in enumerate(rounds)
            for group in _groups(of_type(reports, RewardReport))
        ]
        kept = tuple((number, group.block, group.index) for number, group in found if not group.zero_variance)
        if not kept and len(rounds) >= self._max_rounds:
            right = sum(group.correct[0] for _, group in found)
            raise DataError(
                f"dynamic sampling gives up after {len(rounds)} rounds "
                f"(algorithm.max_resamples={self._max_rounds - 1}): of {len(found)} groups {right} are "
                f"all right and {len(found) - right} all wrong, so that nothing can be learned: choose problems "
                "that are sometimes solved (data.level), a larger algorithm.group_size, or another warm start"
            )
        return RepeatDecision(len(kept) >= self._wanted, kept[: self._wanted])


@dataclass(frozen=True, slots=True)
class _Scored:
    """A group of completions."""

    block: int
    index: int  # within the block
    correct: tuple[bool, ...]
    zero_variance: bool


def _groups(reports: Sequence[RewardReport]) -> list[_Scored]:
    """Returns the groups in the order of blocks."""
    report_of = {block: report for report in reports for block in report.correct}
    return [
        _Scored(block, k, group, report.zero_variance[block][k])
        for block, report in sorted(report_of.items(), key=lambda item: item[0])
        for k, group in enumerate(report.correct[block])
    ]


# -------------------------------------------------------------------------------------------------------- an iteration
def run_iteration(
    executor: Executor, iteration: int, start: int, per_round: int, end: int | None = None
) -> tuple[IterationResult, dict[str, float]]:
    """Runs one iteration and returns what came back, and its metrics by name.

    An iteration is a function of a snapshot: weights, optimizers, counters, and `start`, the number of problems that
    the run has used so far.

    Args:
        executor: of the workflow.
        iteration: its number.
        start: see above.
        per_round: problems of a round.
        end: no iteration of this number or a later one is begun.
    """

    def following(context: StepContext, result: IterationResult) -> StepContext:
        rounds = max(executor.workflow.rounds(result.reports).values(), default=1)
        return replace(
            context, iteration=context.iteration + 1, message=cast(int, context.message) + rounds * per_round
        )

    result = executor.run(StepContext(iteration, message=start), Follow(following, end))
    metrics = rollout_metrics(result.all_of("generation", GenerationReport), result.all_of("reward", RewardReport))
    metrics["rollout/rounds"] = float(max(executor.workflow.rounds(result.reports).values(), default=1))
    if executor.plan.staleness:
        metrics["rollout/staleness"] = float(result.staleness)
    if "critic" in executor.workflow.stages:
        metrics |= result.all_of("critic", CriticReport)[0].metrics
    metrics |= next(r.metrics for r in reversed(result.all_of("actor", ActorReport)) if r.metrics)
    return result, metrics


def rollout_metrics(generated: Sequence[GenerationReport], rewarded: Sequence[RewardReport]) -> dict[str, float]:
    """Returns means over the completions of an iteration, in an order that no plan changes."""
    completions = sum(report.completions for report in generated)
    groups = _groups(rewarded)
    rewards = sorted(item for report in rewarded for item in report.rewards.items())
    return {
        "rollout/accuracy": sum(sum(group.correct) for group in groups) / completions,
        "rollout/reward": sum(value for _, value in rewards) / completions,
        "rollout/formatted": sum(n for report in rewarded for n in report.formatted.values()) / completions,
        "rollout/uniform_groups": sum(group.zero_variance for group in groups) / len(groups),
        "rollout/length": sum(report.tokens for report in generated) / completions,
        "rollout/longest": float(max(report.longest for report in generated)),
        "rollout/truncated": sum(report.truncated for report in generated) / completions,
        "rollout/tokens": float(sum(report.tokens for report in generated)),
        "rollout/completions": float(completions),
    }
