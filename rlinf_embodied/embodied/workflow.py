"""The embodied workflow: its graph, and what one iteration is, top to bottom.

env <==> policy     loop "rollout": H chunk-steps; GRPO repeats it until enough groups have nonzero variance
 |         |
 +-> actor <-+      rewards and what the policy saw, block by block
       |
       +~~> policy  new weights, where the policy does not share the actor's

run_iteration            driver     every step of the plan tree, then metrics of what came back
  Executor._run_loop     driver     the rollout loop: one call per worker, or one per chunk-step and shard
    EnvStage.step        worker     C simulator steps of every row, one image at the end
    RolloutStage.step    worker     encode, sample with keyed noise, keep features, tokens and log-probs
  Executor._leaf         driver     hands the columns on, by reference
    ActorStage.run       worker     advantages, global statistics, epochs of minibatches over all blocks
  Executor.sync_weights  driver     version and checksum, only to workers without an actor

With two levels of policies (config.hierarchy, hierarchy.py) the policy stage asks its high-level policy for a goal
every k chunk-steps (two_level_stage.py), and there are two learners:

env, policy -> high_actor    a decision is one step: discounted rewards up to the next one
env, policy -> actor         as above, unless the low-level policy is frozen
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlinf_embodied.config import AlgorithmName, Critic, HierarchyConfig, TrainConfig
from rlinf_embodied.embodied.actor_stage import ActorConfig, ActorReport
from rlinf_embodied.embodied.batch import Episode, RolloutReport
from rlinf_embodied.embodied.env_stage import EnvStageConfig
from rlinf_embodied.embodied.graph import ACTOR, ENV, HIGH_ACTOR, POLICY, embodied_graph, rollout
from rlinf_embodied.embodied.hierarchy import HIGH_POLICY, Decisions, Guide, LowLevel, LowLevelFiles
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig
from rlinf_embodied.embodied.two_level_stage import TwoLevelConfig
from rlinf_embodied.execution.ahead import Follow
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import of_type
from rlinf_embodied.workflow.graph import RepeatDecision, Workflow


def training_workflow(config: TrainConfig, policy_folder: str, high_folder: str = "") -> Workflow:
    """Returns the graph.

    Args:
        config: of the training.
        policy_folder: the checkpoint that every copy of the policy starts from.
        high_folder: the same of the high-level policy, where there is one.
    """
    env, algorithm, seed, hierarchy = config.env, config.algorithm, config.run.seed, config.hierarchy
    grpo = algorithm.name is AlgorithmName.grpo
    model = PolicyStageConfig(
        *(config.policy, policy_folder, seed, env.block_size),
        precision=algorithm.precision,
        frozen=hierarchy.on and hierarchy.frozen,
    )
    keep_images = not grpo and config.policy.critic is Critic.observation
    keep_images = keep_images or (hierarchy.on and hierarchy.policy.critic is Critic.observation)
    group_size = algorithm.group_size if grpo else 1
    settings = (env, config.run.num_iterations, config.run.exact.holds)
    configs: dict[str, object] = {
        ENV: EnvStageConfig(env, seed, group_size, keep_images),
        POLICY: model,
        ACTOR: ActorConfig(model, algorithm, *settings, view=LowLevel(Guide(hierarchy)) if hierarchy.on else None),
    }
    if hierarchy.on:
        precision = hierarchy.algorithm.precision
        high = PolicyStageConfig(
            *(hierarchy.policy, high_folder, seed, env.block_size), precision=precision, name=HIGH_POLICY
        )
        configs |= {
            POLICY: TwoLevelConfig(model, high, hierarchy),
            HIGH_ACTOR: ActorConfig(
                *(high, hierarchy.algorithm, *settings),
                view=Decisions(hierarchy.every, hierarchy.algorithm.gamma),
                low=LowLevelFiles(policy_folder, config.policy, hierarchy),
            ),
        }
    steps = env.chunks_per_rollout
    # rows that are reset one by one do the same from one episode's length on; frozen ones do less and less to the end
    typical = min(env.chunks_per_episode, steps) if env.auto_reset else 0
    loop = replace(rollout(steps), typical_steps=typical)
    if grpo:
        num_groups = env.num_envs // algorithm.group_size
        rounds = 1 + (algorithm.max_resamples if algorithm.drop_zero_variance_groups else 0)
        sampling_filter = DynamicSamplingFilter(num_groups, algorithm.min_groups, algorithm.drop_zero_variance_groups)
        loop = replace(loop, max_rounds=rounds, decide=sampling_filter)
    where = {"on_cores": config.cluster.cpu_devices > 0, "robots": env.control_hz > 0}
    graph = embodied_graph(env.num_blocks, loop, configs, **where, learners=learners_of(hierarchy))
    warming_up = 0 if grpo or (hierarchy.on and hierarchy.frozen) else algorithm.critic_warmup_iterations
    if hierarchy.on:
        warming_up = max(warming_up, hierarchy.algorithm.critic_warmup_iterations)
    return replace(graph, typical_iteration=warming_up)


def learners_of(hierarchy: HierarchyConfig) -> tuple[str, ...]:
    """Returns the stages that train weights, the one that writes checkpoints first."""
    return (HIGH_ACTOR, *(() if hierarchy.frozen else (ACTOR,))) if hierarchy.on else (ACTOR,)


class DynamicSamplingFilter:
    """Dynamic sampling (DAPO, arXiv 2503.14476): keeps groups whose members differ in the raw task metric.

    The message to the actor is the (round, group) pairs to train on: the first `num_groups` with nonzero variance.
    """

    def __init__(self, num_groups: int, min_groups: int, drop_zero_variance: bool) -> None:
        """Takes how many groups a round has, how many suffice, and whether any are dropped at all."""
        self._num_groups, self._min_groups, self._drop = num_groups, min_groups, drop_zero_variance

    def __call__(self, rounds: Sequence[Sequence[object]]) -> RepeatDecision:
        """Returns whether enough groups have nonzero variance, and which to train on."""
        kept = [
            (number, group)
            for number, reports in enumerate(rounds)
            for group, success in _groups(of_type(reports, RolloutReport))
            if not self._drop or len(set(success)) > 1
        ]
        return RepeatDecision(len(kept) >= self._min_groups, tuple(kept[: self._num_groups]))


def _groups(reports: Sequence[RolloutReport]) -> list[tuple[int, tuple[bool, ...]]]:
    """Returns the success of each group's members, in the order of the groups."""
    return sorted(item for report in reports for item in report.group_success.items())


def run_iteration(
    executor: Executor, iteration: int, end: int | None = None
) -> tuple[IterationResult, dict[str, float]]:
    """Runs one iteration and returns what came back, and its metrics by name; none is begun from number `end` on.

    Where two levels of policies learn, those of the higher one begin with "high/".  An iteration is a function of a
    snapshot: weights, optimizer state, counters and what the env carries over.
    """
    result = executor.run(StepContext(iteration), Follow(end=end))
    reports = result.all_of(ENV, RolloutReport)
    learners = [stage for stage in (ACTOR, HIGH_ACTOR) if stage in executor.workflow.stages]
    updates = {stage: result.all_of(stage, ActorReport)[0].metrics for stage in learners}
    # in an order that no plan changes: floating-point means depend on it
    episodes = sorted((e for report in reports for e in report.episodes), key=lambda e: e.env_id)
    metrics = {f"rollout/{key}": value for key, value in episode_means(episodes).items()}
    metrics["rollout/episodes"] = float(len(episodes))
    metrics["rollout/episodes_cut"] = float(sum(report.num_cut for report in reports))
    metrics["rollout/env_steps"] = float(sum(report.env_steps for report in reports))
    metrics["rollout/rounds"] = float(len(result.reports[ENV]))
    if executor.plan.staleness:
        metrics["rollout/staleness"] = float(result.staleness)
    metrics |= updates[learners[0]]
    return result, metrics | {f"high/{name}": value for stage in learners[1:] for name, value in updates[stage].items()}


def episode_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns the mean of each metric over episodes; nothing if there are none."""
    if not episodes:
        return {}
    return {key: sum(e.metrics[key] for e in episodes) / len(episodes) for key in episodes[0].metrics}
