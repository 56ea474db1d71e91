"""The reasoning workflow: its graph, and one iteration.

prompts -> generation -> reward ---------------------+-> actor ~~> generation, old_log_probs: new weights
              |            |                         |
              +------------+-> critic    (PPO) ------+     values, advantages, update of the critic
              +-> old_log_probs (several steps) -----+     log-probs under the weights that sampled
              +-> reference (kl_coef, loss) ---------+     log-probs under the starting policy
              +-> reward_model -> reward                   scores of a frozen model, if reward.model names one

With a tool or an agent, `episodes` replaces `prompts` and forms a loop with generation; it sends the completions to the
following stages.  With episodes.free there is no loop: generation runs the episodes.

With dynamic sampling all stages before the actor are repeated with further problems, until enough groups have different
rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from rlinf_embodied.config import MathConfig, Precision, ReasoningName, Sharding
from rlinf_embodied.execution.ahead import Follow
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.reasoning.actor_stage import actor_inputs
from rlinf_embodied.reasoning.batch import EngineLoad, GenerationReport, ScoredGroup, in_order
from rlinf_embodied.reasoning.graph import reasoning_graph
from rlinf_embodied.reasoning.policy_folder import REFERENCE, StageConfig
from rlinf_embodied.reasoning.prompt_stage import Position
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import of_type
from rlinf_embodied.workflow.graph import Repeat, RepeatDecision, Workflow


def training_workflow(config: MathConfig, policy_folder: str, reference_folder: str = "") -> Workflow:
    """Returns the graph; the KL divergence is measured from the policy in `reference_folder` ("": `policy_folder`)."""
    algorithm, ppo = config.rl, config.rl.name is ReasoningName.ppo
    episodic = config.has_loop
    reward_model = ["reward_model"] if config.reward.model else []
    stages = ("episodes" if episodic else "prompts", *actor_inputs(algorithm), "actor", *reward_model)
    configs = dict.fromkeys(stages, StageConfig(config, policy_folder))
    configs["reward_model"] = StageConfig(config, str(Path(config.reward.model or "").expanduser().resolve()))
    adapted = config.policy.lora.rank > 0
    if adapted:  # the other weights are frozen, so the reference is the policy without its adapters
        configs["reference"] = StageConfig(config, policy_folder, without_adapters=True)
    else:
        configs["reference"] = StageConfig(config, reference_folder or policy_folder, share=REFERENCE)
    enough = partial(choose_groups, algorithm.prompts_per_iteration)
    resample = Repeat("resample", "actor", "reward", enough, 1 + algorithm.max_resamples)
    graph = reasoning_graph(
        stages,
        config.num_blocks,
        items_per_block=config.rows_per_block,
        blocks_per_batch=config.blocks_per_batch,
        # a pass of a sharded actor is a collective call of its workers, whose chunks have unequal sizes
        wait_for_all=algorithm.sharding is not Sharding.none,
        repeat=resample if algorithm.dynamic_sampling else None,
        configs=configs,
        receivers=("generation", "old_log_probs", *(("reference",) if adapted else ())),
        changes=["generation"] * (config.generation.precision is not Precision.float32),
        waiting=[*["reward"] * config.reward.waits, *["episodes"] * (config.tool.waits or config.agent.waits)],
        turns=config.num_turns if episodic else 1,
        devices_per_engine=config.generation.tensor_parallel_size,
    )
    return replace(graph, typical_iteration=algorithm.critic_warmup_iterations if ppo else 0)


def choose_groups(wanted: int, rounds: Sequence[Sequence[object]]) -> RepeatDecision:
    """Dynamic sampling (DAPO, arXiv 2503.14476): keeps groups whose raw rewards have nonzero variance.

    Returns whether an iteration has the `wanted` number of groups; after the last round it trains on fewer.  The
    message to the actor is the (round, block, group) of the first such groups, on which it trains.
    """
    groups = [(k, group) for k, reports in enumerate(rounds) for group in in_order(of_type(reports, list))]
    kept = tuple((k, group.block, group.index) for k, group in groups if not group.zero_variance)
    return RepeatDecision(len(kept) >= wanted, kept[:wanted])


def run_iteration(
    executor: Executor, config: MathConfig, iteration: int, start: Position
) -> tuple[IterationResult, dict[str, float]]:
    """Runs one iteration; returns its result, and metrics by name.

    An iteration is a function of a snapshot (weights, optimizers and counters) and of `start`, the position in the
    stream of problems.
    """
    num_rounds = lambda result: max(executor.workflow.rounds(result.reports).values(), default=1)  # noqa: E731

    def following(context: StepContext, result: IterationResult) -> StepContext:
        used = cast(Position, context.message).used + num_rounds(result) * config.rl.prompts_per_iteration
        return replace(context, iteration=context.iteration + 1, message=Position(used))

    result = executor.run(StepContext(iteration, message=start), Follow(following, config.run.num_iterations))
    stages = executor.workflow.stages
    is_loop = "episodes" in stages
    reports = result.all_of("episodes" if is_loop else "generation", GenerationReport)
    groups = in_order(result.all_of("reward", list))
    metrics = _rollout_metrics(reports, groups) | {"rollout/rounds": float(num_rounds(result))}
    metrics |= _engine_metrics([load for report in reports for load in report.loads if load.rows])
    turns, completions = sum(report.turns for report in reports), metrics["rollout/completions"]
    if is_loop or turns > completions:
        metrics["rollout/turns"] = turns / completions
    if config.episodes.carried:
        metrics["rollout/stale_tokens"] = sum(report.stale for report in reports) / metrics["rollout/tokens"]
    if any(edge.changes for edge in executor.workflow.weight_edges):
        installs = result.all_of("generation.install_weights", tuple)
        sent, whole = (sum(report[part] for report in installs) for part in (0, 1))
        metrics |= {"charts/weights_sent_mb": sent / 1e6, "charts/weights_sent_share": sent / whole}
    if executor.plan.staleness:
        metrics["rollout/staleness"] = float(result.staleness)
    if "critic" in stages:
        metrics |= result.all_of("critic", dict)[0]
    metrics |= next(report for report in reversed(result.all_of("actor", dict)) if report)
    return result, metrics


def _rollout_metrics(reports: Sequence[GenerationReport], groups: Sequence[ScoredGroup]) -> dict[str, float]:
    completions, lengths = sum(r.completions for r in reports), [length for r in reports for length in r.lengths]
    percentiles = zip((50, 90, 99), np.percentile(lengths, (50, 90, 99)).tolist(), strict=True)
    return {
        "rollout/accuracy": sum(sum(group.correct) for group in groups) / completions,
        "rollout/reward": sum(group.reward for group in groups) / completions,
        "rollout/formatted": sum(group.formatted for group in groups) / completions,
        "rollout/uniform_groups": sum(group.zero_variance for group in groups) / len(groups),
        "rollout/length": sum(lengths) / completions,
        "rollout/longest": float(max(lengths)),
        "rollout/truncated": sum(report.truncated for report in reports) / completions,
        "rollout/tokens": float(sum(lengths)),
        "rollout/completions": float(completions),
        **{f"charts/length_p{q}": length for q, length in percentiles},
        **{f"reward/{name}": sum(group.named[name] for group in groups) / completions for name in groups[0].named},
    }


def _engine_metrics(loads: Sequence[EngineLoad]) -> dict[str, float]:
    if not loads:
        return {}
    seconds, waiting_s = sum(load.seconds for load in loads), sum(load.waiting_s for load in loads)
    return {
        "charts/rows_waiting": waiting_s / seconds,
        "charts/queue_s": waiting_s / sum(load.rows for load in loads),
        "charts/tail_share": sum(load.tail_s for load in loads) / seconds,
    }
