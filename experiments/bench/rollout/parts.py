"""The timed parts, each in a separate process: stock env, our env, our rollout.

rollout   a rollout as in training: what a worker does, without Ray
env       the same chunks of actions, without the policy
stock     the same actions on one stock ManiSkill env, rendering every step
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# Stages are looked into, and gymnasium's `make` hands its keywords on.

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import gymnasium as gym
import torch
from torch import Tensor

from envs.maniskill import read_options
from experiments.bench.harness import Timing
from experiments.bench.harness.trainings import COLLOCATED
from rlinf_embodied.algorithms.batch import RolloutReport
from rlinf_embodied.config import TrainConfig
from rlinf_embodied.embodied.env_stage import Controller, EnvStage, Shard
from rlinf_embodied.embodied.learner import PolicyLearner
from rlinf_embodied.embodied.workflow import training_workflow
from rlinf_embodied.interfaces.envs import ChunkResult, Observation
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.runtime.host import Call, Output, Receipt, StageContext, StepContext, WorkerHost, WorkerSpec
from rlinf_embodied.workflow.graph import Workflow

FIRST_STEP = StepContext(0)


# --------------------------------------------------------------------------------------------------------------- stages
class RecordedEnvStage(EnvStage):
    """The env stage, which keeps what the last rollout asked of its one env object."""

    def open(self, step_context: StepContext, blocks: tuple[int, ...]) -> dict[int, Observation | None]:
        shown = super().open(step_context, blocks)
        (shard,) = self._shards.values()
        self.env = shard.env
        self.first_seeds = [episode.seed for episode in shard.env.running() if episode is not None]
        self.chunks: list[tuple[Tensor, Sequence[int] | None, ChunkResult]] = []
        return shown

    def _advance(self, shard: Shard, actions: Controller, seeds: Sequence[int] | None) -> dict[int, Observation | None]:
        shown = super()._advance(shard, actions, seeds)
        self.chunks.append((actions, seeds, shard.results[-1]))
        return shown


class IdleActor(PolicyLearner):
    """Learns nothing, so that every rollout is the same."""

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        return Output(dict.fromkeys(inputs))


def bench_config(config: TrainConfig, chunk_steps: int) -> TrainConfig:
    """Returns the config with a rollout of this length that starts from reset envs each time."""
    return replace(config, env=replace(config.env, chunks_per_rollout=chunk_steps, carry_over=False))


def bench_workflow(config: TrainConfig, folder: str) -> Workflow:
    """Returns the training workflow whose env stage records; weights stay as they are in the folder."""
    workflow = training_workflow(config, folder)
    targets = {"env": f"{__name__}.RecordedEnvStage", "actor": f"{__name__}.IdleActor"}
    stages = {n: replace(s, target=targets.get(n, s.target)) for n, s in workflow.stages.items()}
    return replace(workflow, stages=stages, weight_edges=())


# -------------------------------------------------------------------------------------------------------------- process
class Bench:
    """One process with every piece; each method does one measurement."""

    def __init__(self, config: TrainConfig, folder: str, worker: int, num_workers: int, stock_steps: int) -> None:
        """Builds what worker `worker` of `num_workers` would have, and records the rollout."""
        torch.set_num_threads(1)
        self._config, self._stock_steps = config, stock_steps
        workflow = bench_workflow(config, folder)
        owners = resolve("bench", COLLOCATED, num_workers, workflow).owners("env", workflow)
        self._blocks = tuple(block for block, owner in enumerate(owners) if owner == worker)
        self._host = WorkerHost(WorkerSpec(worker, "cpu"))
        for name in ("env", "policy"):
            context = StageContext(
                worker, "cpu", self._blocks, (self._blocks,), workflow.num_blocks, owners, SoloGroup(), {}
            )
            self._host.add_stage(workflow.stages[name], context)
        self._stage = cast(RecordedEnvStage, self._host.stages["env"])
        self.rollout()
        self._stock = None

    def rollout(self) -> Timing:
        """Runs the rollout as a worker does: env and policy in one process, the loop in one call."""
        chunk_steps = self._config.env.chunks_per_rollout
        call = Call(
            "env",
            "loop",
            FIRST_STEP,
            self._blocks,
            keep=frozenset(self._blocks),
            partner="policy",
            chunk_steps=chunk_steps,
        )
        start = time.perf_counter()
        receipt = cast(Receipt, self._host.invoke(call, [])[-1])
        seconds = time.perf_counter() - start
        parts: dict[str, float] = {}
        for span in receipt.spans:
            parts[span.name] = parts.get(span.name, 0.0) + span.duration_s
        return Timing(seconds, cast(RolloutReport, receipt.report).env_steps, parts)

    def env(self) -> Timing:
        """Runs the rollout's chunks of actions without the policy."""
        stage, start = self._stage, time.perf_counter()
        stage.env.reset(stage.first_seeds)
        for actions, seeds, _ in stage.chunks:
            stage.env.step_chunk(actions, seeds)
        seconds = time.perf_counter() - start
        return Timing(seconds, sum(int(result.valid.sum()) for _, _, result in stage.chunks))

    def stock(self) -> Timing:
        """Plays what the first row did on ManiSkill's own env, resets included, until enough steps are made."""
        if self._stock is None:
            self._stock = _stock_env(self._config)
        steps, start = 0, time.perf_counter()
        self._stock.reset(seed=self._stage.first_seeds[0])
        for actions, seeds, result in self._stage.chunks:
            for action in actions[0][result.valid[0]][: self._stock_steps - steps]:
                self._stock.step(action)
                steps += 1
            if steps >= self._stock_steps:
                break
            if 0 in result.final_rows and seeds is not None:
                self._stock.reset(seed=seeds[0])
        return Timing(time.perf_counter() - start, steps)


_OF_THIS_PROCESS: list[Bench] = []


def build(*arguments: object) -> None:
    """Gives this process its pieces; the arguments are those of Bench."""
    _OF_THIS_PROCESS.append(Bench(*arguments))


def timed(piece: str) -> Timing:
    return getattr(_OF_THIS_PROCESS[0], piece)()


def _stock_env(config: TrainConfig) -> gym.Env:
    env = config.env
    sensors: dict[str, object] = {"width": env.obs_size, "height": env.obs_size}
    options = read_options(env)
    if options.camera_fov is not None:
        sensors[env.cameras[0]] = {"fov": options.camera_fov}
    robot = {} if options.robot is None else {"robot_uids": options.robot}
    stock = gym.make(
        env.task,
        obs_mode="rgb",
        sim_backend="physx_cpu",
        render_backend="cpu",
        control_mode=options.control_mode,
        reward_mode="normalized_dense",
        sensor_configs=sensors,
        max_episode_steps=env.horizon,
        **robot,
    )
    stock.reset(seed=0)
    stock.step(None)  # the first image of a process compiles the shaders
    return stock
