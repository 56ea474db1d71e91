"""The embodied workflow: its graph, and what one iteration is, top to bottom.

env <==> policy             loop "rollout": H chunk-steps; GRPO repeats it until enough groups have nonzero variance
 |         |
 +-> actor <-+              on-policy: rewards and what the policy saw, block by block
 +-> replay -> actor        off-policy: transitions are kept; batches of all updates of an iteration
       |
       +~~> policy          new weights, where the policy does not share the actor's

run_iteration            driver     every step of the plan, then metrics of the results
  Executor._run_loop     driver     the rollout loop: one call per worker, or one per chunk-step and shard
    EnvStage.step        worker     C simulator steps of every row, one image at the end
    RolloutStage.step    worker     encode, sample with keyed noise, keep features, tokens and log-probs
  Executor._leaf         driver     hands the columns on, by reference
    ReplayStage.run      worker     keeps the block's transitions, draws its part of every batch (off-policy)
    PolicyLearner.run    worker     the algorithm: samples, losses, steps over all blocks (algorithms/)
  Executor.sync_weights  driver     version and checksum, only to workers without an actor

With two levels of policies (config.hierarchy, hierarchy.py) the policy stage asks its high-level policy for a goal
every k chunk-steps, and there are two learners:

env, policy -> high_actor    a decision is one step: discounted rewards up to the next one
env, policy -> actor         as above, unless the low-level policy is frozen
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np

from rlinf_embodied.algorithms.batch import RolloutReport
from rlinf_embodied.algorithms.clipped_objective import Normalization, OnPolicyConfig
from rlinf_embodied.algorithms.transitions import EXPERT_ACTION, IS_INTERVENTION, ReplayConfig
from rlinf_embodied.config import Critic, HierarchyConfig, Source, TrainConfig
from rlinf_embodied.config.algorithm import Resampling
from rlinf_embodied.embodied.env_stage import EnvStageConfig
from rlinf_embodied.embodied.fine_tuning import DemonstratedConfig
from rlinf_embodied.embodied.graph import ACTOR, ENV, HIGH_ACTOR, POLICY, REPLAY, RESAMPLE, ROLLOUT, embodied_graph
from rlinf_embodied.embodied.hierarchy import HIGH_POLICY, TwoLevelConfig, decision_columns, low_level_columns
from rlinf_embodied.embodied.learner import LearnerConfig
from rlinf_embodied.embodied.outcome import episode_means
from rlinf_embodied.embodied.replay_stage import ReplayStageConfig
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig
from rlinf_embodied.embodied.sources import DemonstrationSource
from rlinf_embodied.execution.ahead import Follow
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.runtime.session import of_type
from rlinf_embodied.telemetry.boards import Histogram
from rlinf_embodied.workflow.graph import RepeatDecision, Workflow


def training_workflow(
    config: TrainConfig, policy_folder: str, high_folder: str = "", sources: tuple[DemonstrationSource, ...] = ()
) -> Workflow:
    """Returns the graph; every copy of the policy, and of a high-level one, starts from its folder.

    `sources` are those of the demonstrations that algorithm.bc_coef clones.
    """
    env, algorithm, hierarchy = config.env, config.algorithm, config.hierarchy
    replay = algorithm.learns_from is Source.transitions
    rollouts = partial(_rollout_configs, config, policy_folder, high_folder, sources)
    configs = _replay_configs(config, policy_folder) if replay else rollouts()
    where = {"on_cores": config.cluster.cpu_devices > 0, "robots": env.control_hz > 0}
    where["demonstrates"] = algorithm.uses_demonstrations
    loop = None
    if algorithm.acts:
        steps = env.chunks_per_rollout
        # rows that are reset one by one do the same from one episode's length on; frozen ones do less and less
        typical_steps = min(env.chunks_per_episode, steps) if env.auto_reset else 0
        loop = replace(ROLLOUT, chunk_steps=steps, typical_steps=typical_steps)
    graph = embodied_graph(env.num_blocks, loop, configs, **where, learners=learners_of(hierarchy), replay=replay)
    typical = 0 if hierarchy.on and hierarchy.frozen else algorithm.typical_iteration(env)
    if hierarchy.on:
        typical = max(typical, hierarchy.algorithm.typical_iteration(env))
    again = algorithm.resampling(env)
    if again is not None:
        repeat = replace(RESAMPLE, decide=partial(kept_groups, again), max_rounds=again.max_rounds)
        graph = replace(graph, repeat=repeat)
    return replace(graph, typical_iteration=typical)


def _rollout_configs(
    config: TrainConfig, policy_folder: str, high_folder: str, sources: tuple[DemonstrationSource, ...]
) -> dict[str, object]:
    """Returns what the stages need to know where whole rollouts are learned from."""
    env, algorithm, seed, hierarchy = config.env, config.algorithm, config.run.seed, config.hierarchy
    frozen, exact, number = hierarchy.on and hierarchy.frozen, config.run.exact.holds, config.run.num_iterations
    model = PolicyStageConfig(
        *(config.policy, policy_folder, env, seed),
        exact=exact,
        precision=algorithm.precision,
        greedy=frozen,
        records=not frozen,
    )
    learned = [algorithm, *([hierarchy.algorithm] if hierarchy.on else [])]
    critics = [config.policy.critic] if algorithm.has_critic else []
    critics += [hierarchy.policy.critic] if hierarchy.on else []
    given = {"sources": sources, "start": config.warm_start, "num_blocks": env.num_blocks}
    learner = partial(DemonstratedConfig, **given) if algorithm.uses_demonstrations else LearnerConfig
    configs: dict[str, object] = {
        ENV: EnvStageConfig(
            *(env, seed, algorithm.same_start),
            keep_images=Critic.observation in critics,
            needs_success=algorithm.needs_success,
            tells_tasks=any(getattr(part, "normalize_advantages", None) is Normalization.task for part in learned),
            counts_actions=config.run.has_boards,
        ),
        POLICY: model,
        ACTOR: learner(
            *(model, algorithm, number),
            view=partial(low_level_columns, hierarchy) if hierarchy.on else None,
            counts_ratios=config.run.has_boards,
        ),
    }
    if hierarchy.on:
        learns, folder = cast(OnPolicyConfig, hierarchy.algorithm), high_folder
        high = PolicyStageConfig(
            *(hierarchy.policy, folder, env, seed), exact=exact, precision=learns.precision, name=HIGH_POLICY
        )
        both, view = TwoLevelConfig(model, high, hierarchy), partial(decision_columns, hierarchy.every, learns.gamma)
        configs[POLICY], configs[HIGH_ACTOR] = both, LearnerConfig(high, learns, number, view=view, both=both)
    return configs


def _replay_configs(config: TrainConfig, policy_folder: str) -> dict[str, object]:
    """Returns what the stages need to know where transitions are learned from."""
    env, algorithm, seed = config.env, config.algorithm, config.run.seed
    assert isinstance(algorithm, ReplayConfig)
    plan, columns = algorithm.schedule(env), algorithm.all_columns(config)
    labels = bool({EXPERT_ACTION, IS_INTERVENTION} & {*columns})
    model = PolicyStageConfig(
        *(config.policy, policy_folder, env, seed),
        exact=config.run.exact.holds,
        precision=algorithm.precision,
        greedy=labels and not algorithm.has_returns,
        records=False,
        uniform_until=0 if labels else plan.first_update,
    )
    capacity, data = algorithm.capacity // env.num_blocks, tuple(config.files)
    episodes = (env.block_size, env.horizon) if algorithm.has_returns else None
    replay = ReplayStageConfig(seed, capacity, columns, policy_folder, plan, data, algorithm.mixes, episodes)
    return {
        ENV: EnvStageConfig(
            *(env, seed),
            needs_success=algorithm.needs_success,
            transitions=columns,
            expert_iterations=plan.expert_iterations,
            tolerance=algorithm.tolerance,
            counts_actions=config.run.has_boards,
        ),
        POLICY: model,
        REPLAY: replay,
        ACTOR: LearnerConfig(model, algorithm, config.run.num_iterations),
    }


def learners_of(hierarchy: HierarchyConfig) -> tuple[str, ...]:
    """Returns the stages that train weights, the one that writes checkpoints first."""
    return (HIGH_ACTOR, *(() if hierarchy.frozen else (ACTOR,))) if hierarchy.on else (ACTOR,)


def kept_groups(again: Resampling, rounds: Sequence[Sequence[object]]) -> RepeatDecision:
    """Dynamic sampling (DAPO, arXiv 2503.14476): keeps groups whose members differ in success or return.

    The message to the actor is the (round, group) pairs to train on: the first `num_groups` with nonzero variance.
    """
    kept: list[tuple[int, int]] = []
    for number, reports in enumerate(rounds):
        outcomes = {g: each for report in of_type(reports, RolloutReport) for g, each in report.group_outcomes.items()}
        kept += [(number, group) for group in sorted(outcomes) if not again.drop or len(set(outcomes[group])) > 1]
    return RepeatDecision(len(kept) >= again.min_groups, tuple(kept[: again.num_groups]))


def run_iteration(
    executor: Executor, iteration: int, end: int | None = None
) -> tuple[IterationResult, dict[str, float]]:
    """Runs one iteration and returns what came back, and its metrics by name; none is begun from number `end` on.

    Where two levels of policies learn, those of the higher one begin with "high/".  An iteration is a function of a
    snapshot: weights, optimizer state, counters and what the env carries over.
    """
    result = executor.run(StepContext(iteration), Follow(end=end))
    stages, metrics = executor.workflow.stages, {}
    if ENV in stages:
        reports = result.all_of(ENV, RolloutReport)
        # in an order that no plan changes: floating-point means depend on it
        episodes = sorted((e for report in reports for e in report.episodes), key=lambda e: e.row)
        metrics = {f"rollout/{key}": value for key, value in episode_means(episodes).items()}
        metrics["rollout/episodes"] = float(len(episodes))
        metrics["rollout/episodes_cut"] = float(sum(report.num_cut for report in reports))
        metrics["rollout/env_steps"] = float(sum(report.env_steps for report in reports))
        metrics["rollout/rounds"] = float(len(result.reports[ENV]))
        if reports[0].actions:
            counts = np.sum([report.actions for report in reports], axis=0)
            metrics |= {f"rollout/action_{k}": Histogram(of_number, 1.0) for k, of_number in enumerate(counts)}
    if executor.plan.staleness:
        metrics["rollout/staleness"] = float(result.staleness)
    if REPLAY in stages:
        held = result.all_of(REPLAY, dict)
        metrics |= {name: float(sum(report[name] for report in held)) for name in held[0]}
    learners = [stage for stage in (ACTOR, HIGH_ACTOR) if stage in stages]
    for stage in learners:
        start = "" if stage == learners[0] else "high/"
        metrics |= {f"{start}{name}": value for name, value in result.all_of(stage, dict)[0].items()}
    return result, metrics
