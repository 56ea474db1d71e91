"""The replay buffer as a stage: it keeps each block's transitions and draws every update's part of a batch from them.

    env's transitions --> "replay", or "demonstrations" while the expert acts --+
    recorded transitions (`data`) --> "demonstrations" -------------------------+--> batches of U updates

What was gathered is named state: it is part of checkpoints and of the snapshot of an iteration's start.  What was
recorded is read again when the stage is rebuilt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlinf_embodied.algorithms.transitions import (
    IS_INTERVENTION,
    OUTCOME,
    RETURN,
    Columns,
    ReplaySchedule,
    episode_returns,
    length,
)
from rlinf_embodied.config import FREE_ON_RESUME, EnvConfig
from rlinf_embodied.embodied.policy_folder import trained_under
from rlinf_embodied.errors import CheckpointError, DataError
from rlinf_embodied.learning.checkpoint import load_tensors, verify
from rlinf_embodied.learning.learner_stage import StagePart
from rlinf_embodied.randomness import words
from rlinf_embodied.runtime.host import Output, StageContext, StepContext

REPLAY = "replay"  # in a checkpoint; and what the policy did, within it
DEMONSTRATIONS = "demonstrations"
_SAME = ("_target_", "task", "states", "history")
_CURSOR = "cursor"  # of a state: where the next transition goes


def require_recorded(folders: Sequence[str], env: EnvConfig) -> None:
    """Checks that folders hold transitions of an env.

    Raises:
        CheckpointError: a folder is no checkpoint, is damaged, or holds no transitions.
        DataError: they are of another env.
    """
    for folder in folders:
        said, action = f"data is {folder!r}", "give <run.dir>/checkpoints/latest of a run of algorithm=sac or rlpd"
        if not Path(folder).is_dir():
            raise CheckpointError(f"{said}, but there is no such folder: {action}")
        verify(Path(folder))
        if not load_tensors(Path(folder), REPLAY):
            raise CheckpointError(f"{said}, but that checkpoint holds no transitions: {action}")
        theirs = trained_under(folder).env
        for name, there in _same(theirs).items():
            if (here := _same(env)[name]) != there:
                raise DataError(f"{said}, recorded with env.{name}={there!r}, but env.{name} is {here!r}: use the same")


def _same(env: EnvConfig) -> dict[str, object]:
    """Returns what recorded transitions and an env must have in common, by name."""
    options = {name: value for name, value in env.options.items() if f"env.options.{name}" not in FREE_ON_RESUME}
    return {**{name: getattr(env, name) for name in _SAME}, "options": options}


def recorded_block(folders: Sequence[str], columns: Sequence[str], block: int, num_blocks: int) -> Columns:
    """Returns a block's part of all transitions in some checkpoints, which are dealt out to blocks one by one.

    Raises:
        DataError: the transitions lack a column, or are fewer than the blocks.
    """
    parts: list[Columns] = []
    for folder in folders:
        tensors = load_tensors(Path(folder), REPLAY)
        for start in sorted({name.rpartition(".")[0] for name in tensors}):
            if missing := [name for name in columns if f"{start}.{name}" not in tensors]:
                raise DataError(
                    f"data is {folder!r}, whose transitions have no {', '.join(missing)}: record them with "
                    "algorithm=sac or rlpd, whose transitions have all columns"
                )
            parts.append({name: tensors[f"{start}.{name}"] for name in columns})
    whole = {name: torch.cat([part[name] for part in parts])[block::num_blocks] for name in columns}
    if not length(whole):
        raise DataError(
            f"data is {', '.join(folders)}, which hold fewer transitions than the {num_blocks} blocks: record more, or "
            "use a larger env.block_size"
        )
    return whole


class ReplayBuffer:
    """Transitions of one block, on the CPU; memory is taken as it fills."""

    def __init__(self, capacity: int, episodes: tuple[int, int] | None = None) -> None:
        """Takes the number of transitions, and `rows` and `horizon` of `episode_returns` where draws have returns."""
        self._episodes = episodes
        self._capacity, self._size, self._cursor = capacity, 0, 0
        self._columns: Columns = {}

    def __len__(self) -> int:
        return self._size

    def add(self, columns: Columns) -> None:
        """Puts transitions in, in order; those that were put in first make room."""
        number = length(columns)
        assert number <= self._capacity, f"{number} transitions at once do not fit into {self._capacity}"
        if not self._columns:  # pages of the system are taken when they are first written
            self._columns = {n: torch.empty((self._capacity, *c.shape[1:]), dtype=c.dtype) for n, c in columns.items()}
        first = min(number, self._capacity - self._cursor)
        for name, column in columns.items():
            ring = self._columns[name]
            ring[self._cursor : self._cursor + first] = column[:first]
            ring[: number - first] = column[first:]
        self._cursor = (self._cursor + number) % self._capacity
        self._size = min(self._size + number, self._capacity)

    def draw(self, shape: tuple[int, ...], seed: int, purpose: str, *ids: int) -> Columns:
        """Returns transitions drawn uniformly and with replacement, every column [*shape, ...].

        Where draws have returns, the transitions are of episodes that have ended, and "return" is a column.
        """
        columns, known = self._columns, None
        if self._episodes is not None:
            columns = columns | {RETURN: self._returns(*self._episodes)}
            known = (~columns[RETURN].isnan()).nonzero()[:, 0]
        number = self._size if known is None else len(known)
        assert number > 0, "there is nothing to draw from"
        keyed = words(seed, purpose, *ids, np.arange(int(np.prod(shape))))
        index = torch.from_numpy((keyed % np.uint64(number)).astype(np.int64))
        index = index if known is None else known[index]
        return {name: column.index_select(0, index).unflatten(0, shape) for name, column in columns.items()}

    def _returns(self, rows: int, horizon: int) -> Tensor:
        oldest = self._cursor if self._size == self._capacity else 0
        outcomes = self._columns[OUTCOME][: self._size].roll(-oldest)
        return episode_returns(outcomes, rows, horizon).roll(oldest)

    def export_state(self) -> dict[str, Tensor]:
        """Returns all that it holds, without copies: the columns and the cursor; {} of an empty one."""
        held = {name: column[: self._size] for name, column in self._columns.items()}
        return {**held, _CURSOR: torch.tensor([self._cursor])} if held else {}

    def import_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `export_state` returned, in a new buffer.

        Raises:
            CheckpointError: it holds more than fits in, or columns of different lengths.
        """
        held = {name: column for name, column in state.items() if name != _CURSOR}
        lengths = {len(column) for column in held.values()}
        if held and (len(lengths) > 1 or max(lengths) > self._capacity or _CURSOR not in state):
            raise CheckpointError(
                f"a block of the replay buffer has {sorted(lengths)} transitions and room for {self._capacity}: the "
                "checkpoint is of another run; resume with its own configuration, or use another run.dir"
            )
        if held:
            self.add(held)
            self._cursor = int(state[_CURSOR][0])


@dataclass(frozen=True, slots=True)
class ReplayStageConfig:
    """What the stage needs to know."""

    seed: int
    capacity: int  # transitions of a block
    columns: tuple[str, ...]  # that are kept
    folder: str  # the checkpoint or policy that the run starts from: its files are brought to the stage's nodes
    schedule: ReplaySchedule
    data: tuple[str, ...] = ()  # checkpoints whose transitions are demonstrations
    mixes: bool = False  # whether the expert's transitions are demonstrations, a share of each batch, or as all others
    episodes: tuple[int, int] | None = None  # a block's rows and env.horizon, where batches have returns


class ReplayStage:
    """Keeps and draws transitions, block by block."""

    def __init__(self, config: ReplayStageConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> None:
        self._num_blocks, self._blocks = context.num_blocks, context.blocks
        self._import({})

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Takes each block's transitions in and returns its part of every batch, columns [U, R, ...]; {} in warm-up.

        The report is how many transitions the worker's blocks hold.

        Raises:
            DataError: recorded transitions cannot be used.
        """
        config, iteration = self._config, step_context.iteration
        demonstrates = config.mixes and iteration < config.schedule.expert_iterations
        name = DEMONSTRATIONS if demonstrates else REPLAY
        for block, payloads in inputs.items():
            if config.data and not len(self._buffers[block, DEMONSTRATIONS]):
                recorded = recorded_block(config.data, config.columns, block, self._num_blocks)
                self._buffers[block, DEMONSTRATIONS] = ReplayBuffer(max(length(recorded), config.capacity))
                self._buffers[block, DEMONSTRATIONS].add(recorded)
            for columns in cast("list[Columns]", payloads):
                # HG-DAgger keeps the human's actions alone; where draws have returns, episodes are kept whole
                if IS_INTERVENTION in columns and config.episodes is None:
                    corrected = columns[IS_INTERVENTION] > 0
                    columns = {key: column[corrected] for key, column in columns.items()}
                self._buffers[block, name].add({key: column.cpu() for key, column in columns.items()})
        batches = {block: self._batches(block, iteration) for block in inputs}
        size = lambda name: sum(len(self._buffers[block, name]) for block in inputs)  # noqa: E731
        return Output(batches, {"rollout/replay_size": size(REPLAY), "rollout/demonstrations": size(DEMONSTRATIONS)})

    def _batches(self, block: int, iteration: int) -> Columns:
        config, schedule = self._config, self._config.schedule
        if iteration < schedule.first_update:
            return {}
        own, demonstrations = (self._buffers[block, name] for name in (REPLAY, DEMONSTRATIONS))
        rows = schedule.demonstration_rows if len(own) else schedule.rows
        rows = rows if len(demonstrations) else 0
        parts = [
            buffer.draw((schedule.updates, number), config.seed, name, block, iteration)
            for buffer, number, name in ((own, schedule.rows - rows, REPLAY), (demonstrations, rows, DEMONSTRATIONS))
            if number
        ]
        names = (*config.columns, RETURN) if config.episodes else config.columns
        return {name: torch.cat([part[name] for part in parts], 1) for name in names}

    def export_snapshot(self, step_context: StepContext) -> StagePart:
        """Returns what the worker's blocks gathered, as <block>.<replay or demonstrations>.<column>."""
        held = {
            f"{block}.{name}.{column}": tensor
            for (block, name), buffer in self._buffers.items()
            if not (name == DEMONSTRATIONS and self._config.data)
            for column, tensor in buffer.export_state().items()
        }
        return StagePart({REPLAY: held} if held else {})

    def import_snapshot(self, step_context: StepContext, parts: Sequence[StagePart]) -> None:
        self._import({name: tensor for part in parts for name, tensor in part.tensors.get(REPLAY, {}).items()})

    def load(self, step_context: StepContext, folder: str) -> None:
        self._import(load_tensors(Path(folder), REPLAY))

    def _import(self, tensors: Mapping[str, Tensor]) -> None:
        self._buffers: dict[tuple[int, str], ReplayBuffer] = {}
        for block in self._blocks:
            for name in (REPLAY, DEMONSTRATIONS):
                buffer = self._buffers[block, name] = ReplayBuffer(self._config.capacity, self._config.episodes)
                start = f"{block}.{name}."
                buffer.import_state({k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)})
