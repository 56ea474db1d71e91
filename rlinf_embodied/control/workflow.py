"""What one iteration of learning from transitions is, top to bottom.

run_iteration                 driver   every step of the plan tree, then metrics of what came back
  TransitionEnvStage.step     worker   an env step of every row; what was seen, done and seen then
  ActingStage.step            worker   actions with keyed noise; uniform ones while the buffer warms up
  ReplayStage.run             worker   keeps the block's transitions, draws its part of every batch
  LearnerStage.run            worker   U updates, each a sum over all blocks
  Executor.sync_weights       driver   version and checksum, only to workers without a learner
"""

from __future__ import annotations

from dataclasses import replace

from rlinf_embodied.config import ControlConfig, ControlName
from rlinf_embodied.control.acting_stage import ActingConfig
from rlinf_embodied.control.env_stage import TransitionEnvConfig
from rlinf_embodied.control.graph import ENV, LEARNER, POLICY, REPLAY, control_graph, rollout
from rlinf_embodied.control.learner_stage import LearnerConfig, LearnerReport
from rlinf_embodied.control.replay_stage import ReplayConfig, ReplayReport
from rlinf_embodied.control.transitions import ALL, LABELLED
from rlinf_embodied.embodied.batch import RolloutReport
from rlinf_embodied.embodied.rollout_stage import PolicyStageConfig
from rlinf_embodied.embodied.workflow import episode_means
from rlinf_embodied.execution.executor import Executor, IterationResult
from rlinf_embodied.runtime.host import StepContext
from rlinf_embodied.workflow.graph import Workflow


def control_workflow(config: ControlConfig, policy_folder: str) -> Workflow:
    """Returns the graph; `policy_folder` is the checkpoint that every copy of the policy starts from."""
    env, algorithm, seed = config.env, config.algorithm, config.run.seed
    model = PolicyStageConfig(config.policy, policy_folder, seed, env.block_size)
    labels = algorithm.name is ControlName.dagger
    columns = LABELLED if labels else ALL
    replay = ReplayConfig(
        seed=seed,
        capacity=algorithm.capacity // env.num_blocks,
        rows=config.rows_per_block,
        updates=config.updates_per_iteration,
        first_update=config.first_update,
        columns=columns,
        folder=policy_folder,
        data=tuple(config.files),
        demonstrations_until=0 if labels else config.expert_iterations,
        demonstration_rows=config.demonstration_rows,
    )
    configs: dict[str, object] = {REPLAY: replay, LEARNER: LearnerConfig(model, algorithm, env)}
    if not algorithm.name.acts:
        return control_graph(env.num_blocks, None, configs)
    first = config.first_update
    configs[ENV] = TransitionEnvConfig(env, seed, columns=columns, expert_iterations=config.expert_iterations)
    configs[POLICY] = ActingConfig(
        *(config.policy, policy_folder, seed, env.block_size), uniform_until=0 if labels else first, greedy=labels
    )
    return replace(control_graph(env.num_blocks, rollout(env.chunks_per_rollout), configs), typical_iteration=first)


def run_iteration(executor: Executor, iteration: int) -> tuple[IterationResult, dict[str, float]]:
    """Runs one iteration and returns what came back, and its metrics by name.

    An iteration is a function of a snapshot: weights, critics, moments, transitions and what the env carries over.
    """
    result = executor.run(StepContext(iteration))
    held = result.all_of(REPLAY, ReplayReport)
    metrics = {
        "rollout/replay_size": float(sum(report.size for report in held)),
        "rollout/demonstrations": float(sum(report.demonstrations for report in held)),
        **(_rollout_metrics(result) if ENV in executor.workflow.stages else {}),
    }
    return result, metrics | result.all_of(LEARNER, LearnerReport)[0].metrics


def _rollout_metrics(result: IterationResult) -> dict[str, float]:
    reports = result.all_of(ENV, RolloutReport)
    # in an order that no plan changes: floating-point means depend on it
    episodes = sorted((e for report in reports for e in report.episodes), key=lambda e: e.env_id)
    metrics = {f"rollout/{key}": value for key, value in episode_means(episodes).items()}
    metrics["rollout/episodes"] = float(len(episodes))
    metrics["rollout/env_steps"] = float(sum(report.env_steps for report in reports))
    return metrics
