"""The simulator as a stage: it opens the rollout loop, steps its rows by chunks, and keeps their rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.config import EnvConfig
from rlinf_embodied.embodied.batch import EnvColumns, Episode, RolloutReport
from rlinf_embodied.interfaces.envs import ChunkResult, EnvSpec, EpisodeEnd, Observation, RunningEpisode, VectorEnv
from rlinf_embodied.randomness import reset_seed
from rlinf_embodied.runtime.host import Output, StageContext, Tick
from rlinf_embodied.targets import load_target

Blocks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EnvStageConfig:
    """What the stage needs to know."""

    env: EnvConfig
    seed: int
    group_size: int = 1  # rows that start from one initial state
    keep_images: bool = False  # a critic needs pictures of final and last observations


@dataclass(slots=True)
class _Part:
    """The rows of one shard: one simulator object, and the rollout under way on it."""

    blocks: Blocks
    env: VectorEnv
    env_ids: np.ndarray
    running: np.ndarray  # bool, rows that are not frozen
    episode: np.ndarray  # int64, number of each row's episode within this rollout
    begun: np.ndarray  # int64, chunk-step of this rollout in which each row's episode began; 0 if before it
    observation: Observation | None = None
    results: list[ChunkResult] = field(default_factory=list)
    ended: list[Episode] = field(default_factory=list)  # in this rollout, those that count
    num_cut: int = 0  # episodes of this rollout that do not count


def make_env(config: EnvConfig, num_envs: int, device: str, render_final: bool = False) -> VectorEnv:
    """Returns the env that `env._target_` names."""
    return cast(VectorEnv, load_target(config._target_)(config, num_envs, device, render_final))


class EnvStage:
    """Rolls out `env.chunks_per_rollout` chunk-steps of every row."""

    stays_on = ("cuda",)  # no simulator leaves the memory of a GPU

    def __init__(self, config: EnvStageConfig) -> None:
        """Takes plain data; `setup` builds the simulator."""
        self._config = config
        self._size = config.env.block_size

    def setup(self, context: StageContext) -> EnvSpec:
        """Builds one env object per shard and returns the facts about it."""
        self._parts = {}
        for blocks in context.shards:
            env = make_env(self._config.env, len(blocks) * self._size, context.device, self._config.keep_images)
            ids = np.concatenate([np.arange(b * self._size, (b + 1) * self._size) for b in blocks])
            idle = np.zeros(len(ids), dtype=bool)
            self._parts[blocks] = _Part(blocks, env, ids, idle, np.zeros_like(ids), np.zeros_like(ids))
        return next(iter(self._parts.values())).env.spec

    # ------------------------------------------------------------------------------------------------ rollout loop
    def open(self, tick: Tick, blocks: Blocks) -> dict[int, Observation | None]:
        """Starts an episode in every row, or goes on with the running ones, and shows what the policy sees first."""
        part = self._parts[blocks]
        self._begin(part)
        if part.observation is None or not self._config.env.carry_over:
            part.observation = part.env.reset(self._seeds(part, tick, part.episode).tolist())
            part.running[:] = True
        return self._by_block(part, part.observation)

    def _begin(self, part: _Part) -> None:
        """Forgets the rollout before."""
        part.results, part.ended, part.num_cut = [], [], 0
        part.episode[:] = 0
        part.begun[:] = 0

    def _seeds(self, part: _Part, tick: Tick, episode: np.ndarray) -> np.ndarray:
        """Reset seeds of each row's episode of that number: keyed by its group, never by worker or shard."""
        groups = part.env_ids // self._config.group_size
        return reset_seed(self._config.seed, groups, tick.iteration, tick.round, episode)

    def step(self, tick: Tick, actions: Mapping[int, Tensor | None]) -> dict[int, Observation | None]:
        """Runs one chunk of actions [B, C, A] per block; None stands for a block whose rows are all frozen."""
        part = self._parts[tuple(actions)]
        if all(chunk is None for chunk in actions.values()):
            return dict.fromkeys(actions)
        spec = part.env.spec
        device = next(chunk.device for chunk in actions.values() if chunk is not None)
        idle = torch.zeros(self._size, spec.chunk, spec.action_dim, device=device)
        chunk = torch.cat([idle if a is None else a for a in actions.values()])
        seeds = self._seeds(part, tick, part.episode + 1).tolist() if self._config.env.auto_reset else None
        return self._advance(part, chunk, seeds)

    def _advance(
        self, part: _Part, actions: Tensor | Callable[[int], Tensor], seeds: Sequence[int] | None
    ) -> dict[int, Observation | None]:
        """Runs one chunk of all rows (arguments as VectorEnv.step_chunk) and keeps what it gave."""
        result = part.env.step_chunk(actions, seeds)
        self._count(part, result.episodes)
        part.results.append(self._light(result))
        final = list(result.final_rows)
        part.episode[final] += 1
        part.begun[final] = len(part.results)
        if seeds is None:
            part.running[final] = False
        part.observation = result.observation
        return self._by_block(part, result.observation)

    def _count(self, part: _Part, ends: Sequence[EpisodeEnd]) -> None:
        """Files the episodes that ended.

        One that began too late to be seen to its end whatever happens does not count, and counts as cut: if the early
        ends among them counted, and only they, quick successes would be counted and slow failures would not.
        """
        for end in ends:
            if self._seen_whole(part, end.row):
                part.ended.append(Episode(int(part.env_ids[end.row]), end.seed, dict(end.metrics), end.task))
            else:
                part.num_cut += 1

    def _seen_whole(self, part: _Part, row: int) -> bool:
        env = self._config.env
        return env.carry_over or int(part.begun[row]) + env.horizon // env.chunk <= env.chunks_per_rollout

    def _light(self, result: ChunkResult) -> ChunkResult:
        """Forgets what nobody downstream reads: pictures stay with the policy that saw them."""
        final = result.final_observation
        if final is not None and not self._config.keep_images:
            final = _without_images(final)
        return ChunkResult(
            result.rewards,
            result.terminated,
            result.truncated,
            result.valid,
            result.success,
            result.privileged,
            result.final_rows,
            final,
            _without_images(result.observation),
            result.episodes,
        )

    def _by_block(self, part: _Part, observation: Observation) -> dict[int, Observation | None]:
        """Splits rows into blocks; a block of frozen rows has nothing to show."""
        shown: dict[int, Observation | None] = {}
        for i, block in enumerate(part.blocks):
            rows = slice(i * self._size, (i + 1) * self._size)
            shown[block] = observation.rows(rows) if part.running[rows].any() else None
        return shown

    def close(self, tick: Tick, blocks: Mapping[int, object]) -> Output:
        """Returns each block's columns, and a report on the episodes that ended."""
        part = self._parts[tuple(blocks)]
        assert part.observation is not None
        columns = {block: self._columns(part, i, tick) for i, block in enumerate(part.blocks)}
        env_steps = sum(int(result.valid.sum()) for result in part.results)
        begun = part.running & (part.begun < len(part.results))  # not those that are to begin
        late = sum(not self._seen_whole(part, int(row)) for row in np.flatnonzero(begun))
        report = RolloutReport(tuple(part.ended), env_steps, self._group_success(columns), part.num_cut + late)
        part.results = []
        return Output(columns, report)

    def _columns(self, part: _Part, index: int, tick: Tick) -> EnvColumns:
        low, high = index * self._size, (index + 1) * self._size
        assert part.observation is not None
        last = part.observation.rows(slice(low, high))
        results = [r for r in part.results if bool(r.valid[low:high].any())]  # the policy was not asked for the others
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
                if low <= end.row < high and end.metrics["success_at_end"] > 0:
                    success[end.row - low] = True
        return EnvColumns(
            rewards=stack("rewards"),
            terminated=stack("terminated"),
            truncated=stack("truncated"),
            valid=stack("valid"),
            privileged=None if results[0].privileged is None else stack("privileged"),
            last=last if self._config.keep_images else _without_images(last),
            final_index=torch.tensor(final_index, dtype=torch.long).reshape(-1, 2),
            final=Observation.concatenate(finals) if finals else None,
            success=success,
            round=tick.round,
        )

    def _group_success(self, columns: Mapping[int, EnvColumns]) -> dict[int, tuple[bool, ...]]:
        size = self._config.group_size
        if size == 1:
            return {}
        groups = {}
        for block, column in columns.items():
            for k in range(self._size // size):
                members = column.success[k * size : (k + 1) * size]
                groups[block * (self._size // size) + k] = tuple(bool(value) for value in members)
        return groups

    # ----------------------------------------------------------------------------------------------- context switch
    def offload(self, tick: Tick) -> None:
        """Leaves the device's memory: on a CPU it holds none that another stage could use."""

    def onload(self, tick: Tick) -> None:
        """Comes back."""

    # --------------------------------------------------------------------------------------------------- carry-over
    def export_state(self, tick: Tick) -> dict[int, list[RunningEpisode | None]]:
        """Returns the running episodes of each block as (seed, actions): all that an env carries over."""
        if not self._config.env.carry_over:
            return {}
        state = {}
        for part in self._parts.values():
            running = part.env.running()
            for i, block in enumerate(part.blocks):
                state[block] = running[i * self._size : (i + 1) * self._size]
        return state

    def import_state(self, tick: Tick, state: Mapping[int, list[RunningEpisode | None]]) -> None:
        """Brings every row to where `export_state` found it, by reset and replay."""
        for part in self._parts.values():
            if all(block in state for block in part.blocks):
                episodes = [episode for block in part.blocks for episode in state[block]]
                part.observation = part.env.restore(episodes)
                part.running[:] = [episode is not None for episode in episodes]


def _without_images(observation: Observation) -> Observation:
    return Observation(observation.proprio, observation.instruction, None, observation.privileged)
