"""The simulator as a stage: it opens the rollout loop, steps its rows by chunks, and keeps their rewards."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms import transitions
from rlinf_embodied.algorithms.batch import EnvColumns, RolloutReport
from rlinf_embodied.algorithms.transitions import Columns
from rlinf_embodied.config import EnvConfig
from rlinf_embodied.config.checks import require
from rlinf_embodied.config.env import LATE
from rlinf_embodied.data.action_chunks import ActionChunks
from rlinf_embodied.errors import ConfigError, SimulatorError
from rlinf_embodied.interfaces.envs import (
    PRIVILEGED,
    ChunkResult,
    EnvSpec,
    EpisodeEnd,
    Observation,
    RunningEpisode,
    VectorEnv,
)
from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.learning.learner_stage import StagePart
from rlinf_embodied.plug_ins import load_target, named_when_raised
from rlinf_embodied.randomness import reset_seed
from rlinf_embodied.runtime.host import HoldsNoMemory, Output, StageContext, StepContext
from rlinf_embodied.telemetry.boards import Histogram

CARRY_OVER = "carry_over"  # in a checkpoint
Blocks = tuple[int, ...]
Controller = Tensor | Callable[[int], Tensor]  # a chunk [N, C, A], or what gives the action [N, A] of a sub-step


@dataclass(frozen=True, slots=True)
class EnvStageConfig:
    """What the stage needs to know."""

    env: EnvConfig
    seed: int
    group_size: int = 1  # rows that start from one initial state
    tells_tasks: bool = False  # whether columns say which instruction rows had
    needs_success: bool = False  # these rows are compared by success, not by return
    keep_images: bool = False  # a critic needs images of final and last observations
    transitions: tuple[str, ...] = ()  # columns of single env steps that it gives instead of those of a rollout
    expert_iterations: int = 0  # iterations before this one the scripted expert acts instead of the policy
    tolerance: float = math.inf  # where the policy's action is farther from the expert's than this, the expert acts
    counts_actions: bool = False  # whether reports have the histograms of what was executed
    ensemble: float | None = None  # see EvalConfig.temporal_ensemble


@dataclass(slots=True)
class Shard:
    """The rows of one shard: one simulator object, and the rollout under way on it."""

    blocks: Blocks
    env: VectorEnv
    env_ids: np.ndarray
    running: np.ndarray  # bool, rows that are not frozen
    episode: np.ndarray  # int64, number of each row's episode within this rollout
    begun: np.ndarray  # int64, chunk-step of this rollout in which each row's episode began; 0 if before it
    chunks: ActionChunks | None = None  # where they overlap
    next_seeds: list[int] | None = None  # of the episodes that would begin now; None: not known since one ended
    observation: Observation | None = None
    results: list[ChunkResult] = field(default_factory=list)
    actions: list[Tensor] = field(default_factory=list)  # [N, C, A] of each chunk-step, where they are counted
    tasks: list[Tensor] = field(default_factory=list)  # int64 [N] of each chunk-step, where columns have them
    is_intervention: Tensor | None = None  # bool [N], whether the human acts in this step
    steps: list[Columns] = field(default_factory=list)  # transitions of this rollout, every column [N, ...]
    ended: list[EpisodeEnd] = field(default_factory=list)  # in this rollout, those that count


def make_env(config: EnvConfig, num_envs: int, device: str, render_final: bool = False) -> VectorEnv:
    """Returns the env that `env._target_` names.

    Raises:
        SimulatorError: an env of the user's own raised something while it was built; says where.
    """
    build = cast(Callable[..., VectorEnv], load_target(config._target_))
    where = f"env._target_ is {config._target_!r}, but building its {num_envs} rows (env.task={config.task}) raised "
    action = "\nFix it there, or the keys of env.* that it reads (docs/own_env.md has a test of it)"
    with named_when_raised(lambda raised: SimulatorError(f"{where}{raised}{action}")):
        env = build(config, num_envs, device, render_final)
    rule = f"{config._target_} shows {env.spec.history} env steps (EnvSpec.history)"
    require(env.spec.history == config.history, "env.history", config.history, rule, f"use {env.spec.history}")
    known = getattr(env, "perturbs", ())
    for name, value in ((name, value) for name, value in config.perturb.axes.items() if name not in LATE):
        rule = f"{config._target_} on {env.spec.backend} can perturb {', '.join(known) or 'nothing'}"
        require(name in known, f"env.perturb.{name}", value, rule, "leave it out, or use an env that can")
    return env


def require_success(spec: EnvSpec, needed: bool) -> None:
    """Checks that an env tells success where an algorithm compares episodes by it."""
    rule = "it does not tell whether it is solved, so that all episodes would count alike"
    action = "use algorithm=ppo, or with algorithm=grpo algorithm.success_only=false to compare returns"
    require(spec.has_success or not needed, "env.task", spec.task, rule, action)


def paced(env: VectorEnv, actions: Controller, next_seeds: Sequence[int] | None, control_hz: float) -> ChunkResult:
    """Runs a chunk on robots, whose env steps take at least 1 / control_hz s each, whatever computes them.

    What the env computes in a step, images included, is part of its period; the rest is slept.
    """
    over_s = 0.0  # when the step under way will be over, by time.monotonic

    def sleep() -> None:
        while (left_s := over_s - time.monotonic()) > 0:
            time.sleep(left_s)

    def in_time(substep: int) -> Tensor:
        nonlocal over_s
        sleep()
        over_s = time.monotonic() + 1.0 / control_hz
        return actions[:, substep] if isinstance(actions, Tensor) else actions(substep)

    result = env.step_chunk(in_time, next_seeds)
    sleep()
    return result


class EnvStage(HoldsNoMemory):
    """Rolls out `env.chunks_per_rollout` chunk-steps of every row."""

    stays_on_accelerators = True  # no simulator leaves the memory of a GPU; on a CPU it has no device's

    def __init__(self, config: EnvStageConfig) -> None:
        self._config = config
        self._size = config.env.block_size
        self._shards: dict[Blocks, Shard] = {}

    def setup(self, context: StageContext) -> EnvSpec:
        """Builds one env object per shard and returns the facts about it.

        Raises:
            ConfigError: success is needed, and the env cannot tell it.
        """
        self._shards = {}
        for blocks in context.shards:
            env = make_env(self._config.env, len(blocks) * self._size, context.device, self._config.keep_images)
            ids = np.concatenate([np.arange(b * self._size, (b + 1) * self._size) for b in blocks])
            idle = np.zeros(len(ids), dtype=bool)
            self._shards[blocks] = shard = Shard(blocks, env, ids, idle, np.zeros_like(ids), np.zeros_like(ids))
            if self._config.env.overlaps or self._config.ensemble is not None:
                shard.chunks = ActionChunks(self._config.env, env.spec, self._config.ensemble)
        spec = next(iter(self._shards.values())).env.spec
        require_success(spec, self._config.needs_success)
        return spec

    def open(self, step_context: StepContext, blocks: Blocks) -> dict[int, Observation | None]:
        """Starts an episode in every row, or continues the running ones, and returns the policy's first observation."""
        shard = self._shards[blocks]
        self._begin(shard, shard.env_ids, step_context.iteration, step_context.round)
        if shard.observation is None or not self._config.env.carry_over:
            shard.observation = shard.env.reset(self._seeds(shard, step_context, shard.episode).tolist())
            shard.running[:] = True
        return self._by_block(shard, shard.observation)

    def _begin(self, shard: Shard, *keys: int | np.ndarray) -> None:
        """Forgets the rollout before; what is drawn in this one is keyed by the rows' numbers and others."""
        shard.results, shard.tasks, shard.steps, shard.ended, shard.next_seeds = [], [], [], [], None
        shard.actions = []
        if shard.chunks is not None:
            shard.chunks.begin(*keys)
        shard.episode[:] = 0
        shard.begun[:] = 0

    def _seeds(self, shard: Shard, step_context: StepContext, episode: np.ndarray) -> np.ndarray:
        """Reset seeds of each row's episode of that number: keyed by its group, never by worker or shard."""
        groups = shard.env_ids // self._config.group_size
        return reset_seed(self._config.seed, groups, step_context.iteration, step_context.round, episode)

    def step(self, step_context: StepContext, actions: Mapping[int, Tensor | None]) -> dict[int, Observation | None]:
        """Runs one chunk of actions [B, C, A] per block; None stands for a block whose rows are all frozen."""
        shard = self._shards[tuple(actions)]
        if step_context.iteration < self._config.expert_iterations:
            chosen = shard.env.expert_actions().clamp(-1.0, 1.0)[:, None].split(self._size)
            actions = dict(zip(actions, chosen, strict=True))
        shown = [chunk for chunk in actions.values() if chunk is not None]
        if not shown:
            return dict.fromkeys(actions)
        spec = shard.env.spec
        idle = torch.zeros(self._size, spec.chunk, spec.action_dim, device=shown[0].device)
        if shown[0].shape[1:] != idle.shape[1:]:
            raise ConfigError(
                f"the policy acts in chunks of {list(shown[0].shape[1:])}, but {spec.task} takes "
                f"{list(idle.shape[1:])}: give env.chunk, and what decides the size of its actions, as in its training"
            )
        if self._config.env.auto_reset and shard.next_seeds is None:
            shard.next_seeds = self._seeds(shard, step_context, shard.episode + 1).tolist()
        chunk = torch.cat([idle if a is None else a for a in actions.values()])
        chunk = chunk if shard.chunks is None else shard.chunks.executed(chunk)
        if transitions.IS_INTERVENTION in self._config.transitions:
            expert = shard.env.expert_actions().clamp(-1.0, 1.0).to(chunk.device)
            demonstrates = step_context.iteration < self._config.expert_iterations
            takes_over = (chunk[:, 0] - expert).abs().amax(1) > (-1.0 if demonstrates else self._config.tolerance)
            chunk, shard.is_intervention = torch.where(takes_over[:, None, None], expert[:, None], chunk), takes_over
        return self._advance(shard, chunk, shard.next_seeds)

    def _advance(self, shard: Shard, actions: Controller, seeds: Sequence[int] | None) -> dict[int, Observation | None]:
        """Runs one chunk of all rows (arguments as VectorEnv.step_chunk) and keeps what it gave."""
        before, env, rate = self._before(shard), shard.env, self._config.env.control_hz
        if self._config.tells_tasks:
            shown = cast(Observation, shard.observation).instruction
            shard.tasks.append(torch.tensor([zlib.crc32(text.encode()) for text in shown]))
        result = paced(env, actions, seeds, rate) if rate else env.step_chunk(actions, seeds)
        if self._config.counts_actions and isinstance(actions, Tensor):
            shard.actions.append(actions)
        if before:
            assert isinstance(actions, Tensor)
            if shard.is_intervention is not None:
                before[transitions.IS_INTERVENTION] = shard.is_intervention.to(torch.float32)
            shard.steps.append(self._transition(before, actions, result))
        shard.ended += [end for end in result.episodes if self._seen_whole(shard, end.row)]
        # what nobody downstream reads is forgotten: images stay with the policy that saw them
        final = result.final_observation
        if final is not None and not self._config.keep_images:
            final = final.without_images()
        shard.results.append(replace(result, final_observation=final, observation=result.observation.without_images()))
        rows = list(result.final_rows)
        shard.next_seeds = None if rows else shard.next_seeds
        shard.episode[rows] += 1
        shard.begun[rows] = len(shard.results)
        if shard.chunks is not None:
            shard.chunks.forget(rows)
        if seeds is None:
            shard.running[rows] = False
        shard.observation = result.observation
        return self._by_block(shard, result.observation)

    def _seen_whole(self, shard: Shard, row: int) -> bool:
        """Whether a row's episode counts: it began early enough to end within the rollout in every case.

        If the early ends among the others counted, quick successes would be counted and slow failures would not.
        """
        env = self._config.env
        return env.carry_over or int(shard.begun[row]) + env.chunks_per_episode <= env.chunks_per_rollout

    def _before(self, shard: Shard) -> Columns:
        """Returns what transitions hold of the moment before a step; {} where none are kept."""
        wanted, observation = self._config.transitions, shard.observation
        if not wanted:
            return {}
        assert observation is not None
        columns = {transitions.STATE: observation.proprio}
        columns |= {transitions.IMAGES + name: images for name, images in observation.images.items()}
        if transitions.INSTRUCTION in wanted:
            columns[transitions.INSTRUCTION] = transitions.text_column(observation.instruction)
        if PRIVILEGED in wanted:
            assert observation.privileged is not None
            columns[PRIVILEGED] = observation.privileged
        if transitions.EXPERT_ACTION in wanted:
            columns[transitions.EXPERT_ACTION] = shard.env.expert_actions().clamp(-1.0, 1.0)
        return columns

    def _transition(self, before: Columns, actions: Tensor, result: ChunkResult) -> Columns:
        """Returns the transition of every row, of a chunk of one action."""
        after = result.observation.proprio.clone()
        if result.final_observation is not None:
            after[list(result.final_rows)] = result.final_observation.proprio
        ended = (result.terminated | result.truncated)[:, 0].to(torch.float32)
        columns = before | {
            transitions.ACTION: actions[:, 0],
            transitions.REWARD: result.rewards[:, 0],
            transitions.NEXT_STATE: after,
            transitions.TERMINATED: result.terminated[:, 0].to(torch.float32),
            transitions.OUTCOME: torch.where(result.success[:, 0], ended, -ended),
        }
        return {name: columns[name] for name in self._config.transitions}

    def _by_block(self, shard: Shard, observation: Observation) -> dict[int, Observation | None]:
        """Splits rows into blocks; a block of frozen rows has nothing to show."""
        observation = observation if shard.chunks is None else shard.chunks.shown(observation)
        by_block: dict[int, Observation | None] = {}
        for i, block in enumerate(shard.blocks):
            rows = slice(i * self._size, (i + 1) * self._size)
            by_block[block] = observation.rows(rows) if shard.running[rows].any() else None
        return by_block

    def close(self, step_context: StepContext, blocks: Mapping[int, object]) -> Output:
        """Returns each block's columns, and a report on the episodes that ended."""
        shard = self._shards[tuple(blocks)]
        assert shard.observation is not None
        columns = {block: self._columns(shard, i, step_context) for i, block in enumerate(shard.blocks)}
        groups: dict[int, tuple[float, ...]] = {}
        size = self._config.group_size
        if size > 1 and not self._config.transitions:
            for block, column in cast("dict[int, EnvColumns]", columns).items():
                first = block * (self._size // size)
                outcome = column.success if self._config.needs_success else column.returns
                groups |= {first + k: tuple(part.tolist()) for k, part in enumerate(outcome.split(size))}
        env_steps = sum(int(result.valid.sum()) for result in shard.results)
        begun = np.flatnonzero(shard.running & (shard.begun < len(shard.results)))  # not those that are to begin
        late = sum(not self._seen_whole(shard, int(row)) for row in begun)
        num_cut = late + sum(len(result.episodes) for result in shard.results) - len(shard.ended)
        counts: list[list[float]] = []
        if shard.actions:
            valid = torch.stack([result.valid for result in shard.results])
            executed = torch.stack(shard.actions)[valid.to(shard.actions[0].device)]
            counts = [Histogram.count(numbers, 1.0).tolist() for numbers in executed.unbind(-1)]
        shard.results, shard.tasks, shard.steps, shard.actions = [], [], [], []
        ended = (replace(e, row=int(shard.env_ids[e.row]), metrics=dict(e.metrics)) for e in shard.ended)
        return Output(columns, RolloutReport(tuple(ended), env_steps, groups, num_cut, counts))

    def _columns(self, shard: Shard, index: int, step_context: StepContext) -> EnvColumns | Columns:
        """Returns a block's part of the rollout, or its transitions step by step."""
        low, high = index * self._size, (index + 1) * self._size
        if wanted := self._config.transitions:
            return {name: torch.cat([step[name][low:high] for step in shard.steps]) for name in wanted}
        assert shard.observation is not None
        last = shard.observation.rows(slice(low, high))
        # for the others the policy was not asked
        kept = [k for k, r in enumerate(shard.results) if bool(r.valid[low:high].any())]
        results = [shard.results[k] for k in kept]
        stack = lambda name: torch.stack([getattr(r, name)[low:high] for r in results])  # noqa: E731
        finals, final_index = [], []
        for step, result in enumerate(results):
            mine = [k for k, row in enumerate(result.final_rows) if low <= row < high]
            if mine and result.final_observation is not None:
                finals.append(result.final_observation.rows(mine))
                final_index += [(step, result.final_rows[k] - low) for k in mine]
        success = torch.zeros(self._size, dtype=torch.bool)
        for result in results:
            for end in result.episodes:
                if low <= end.row < high and end.metrics.get("success_at_end", 0.0) > 0:
                    success[end.row - low] = True
        return EnvColumns(
            rewards=stack("rewards"),
            terminated=stack("terminated"),
            truncated=stack("truncated"),
            valid=stack("valid"),
            privileged=None if results[0].privileged is None else stack("privileged"),
            last=last if self._config.keep_images else last.without_images(),
            final_index=torch.tensor(final_index, dtype=torch.long).reshape(-1, 2),
            final=Observation.concatenate(finals) if finals else None,
            success=success,
            round=step_context.round,
            tasks=torch.stack([shard.tasks[k][low:high] for k in kept]) if shard.tasks else None,
        )

    def leave(self) -> None:
        """Closes the simulators: foreign ones have processes, others GPU memory."""
        for shard in self._shards.values():
            shard.env.close()
        self._shards = {}

    def export_snapshot(self, step_context: StepContext) -> StagePart | None:
        """Returns the running episodes as <env id>.seed and <env id>.actions; None where nothing is carried over."""
        if not self._config.env.carry_over:
            return None
        state: dict[str, Tensor] = {}
        for shard in self._shards.values():
            for env_id, episode in zip(shard.env_ids, shard.env.running(), strict=True):
                if episode is not None:
                    state[f"{env_id}.seed"] = torch.tensor([episode.seed])
                    state[f"{env_id}.actions"] = episode.actions.cpu().contiguous()
        return StagePart({CARRY_OVER: state} if state else {})

    def load(self, step_context: StepContext, folder: str) -> None:
        self.import_snapshot(step_context, [StagePart({CARRY_OVER: load_tensors(Path(folder), CARRY_OVER)})])

    def import_snapshot(self, step_context: StepContext, parts: Sequence[StagePart]) -> None:
        """Brings every row to where it was, by reset and replay; before the first rollout, to no episode."""
        state = {name: tensor for part in parts for name, tensor in part.tensors.get(CARRY_OVER, {}).items()}
        for shard in self._shards.values():
            episodes = [
                RunningEpisode(int(state[f"{i}.seed"][0]), state[f"{i}.actions"]) if f"{i}.seed" in state else None
                for i in shard.env_ids
            ]
            running = [episode is not None for episode in episodes]
            shard.observation = shard.env.restore(episodes) if any(running) else None
            if any(running):
                shard.running[:] = running
