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

import torch
from torch import Tensor

from rlinf_embodied.algorithms.transitions import Columns
from rlinf_embodied.embodied.recorded_transitions import REPLAY, recorded_block
from rlinf_embodied.embodied.replay_buffer import ReplayBuffer
from rlinf_embodied.errors import DataError
from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.learning.learner_stage import StagePart
from rlinf_embodied.runtime.host import Output, StageContext, StepContext

DEMONSTRATIONS = "demonstrations"


@dataclass(frozen=True, slots=True)
class ReplayStageConfig:
    """What the stage needs to know."""

    seed: int
    capacity: int  # transitions of a block
    rows: int  # of a block in a batch
    updates: int  # per iteration
    first_update: int  # the iteration
    columns: tuple[str, ...]  # that are kept
    folder: str  # the checkpoint or policy that the run starts from: its files are brought to the stage's nodes
    data: tuple[str, ...] = ()  # checkpoints whose transitions are demonstrations
    demonstrations_until: int = 0  # iterations before this one are kept as demonstrations
    demonstration_rows: int = 0  # of `rows`, as long as there are both


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What the driver learns: how many transitions the worker's blocks hold."""

    size: int
    demonstrations: int


class ReplayStage:
    """Keeps and draws transitions, block by block."""

    def __init__(self, config: ReplayStageConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> None:
        """Starts with empty buffers."""
        self._num_blocks = context.num_blocks
        self._buffers = {(b, name): self._empty() for b in context.blocks for name in (REPLAY, DEMONSTRATIONS)}

    def _empty(self) -> ReplayBuffer:
        return ReplayBuffer(self._config.capacity)

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Takes each block's transitions in and returns its part of every batch, columns [U, R, ...]; {} in warm-up.

        Raises:
            DataError: recorded transitions are of another env than those that arrive, or cannot be read.
        """
        config, iteration = self._config, step_context.iteration
        name = DEMONSTRATIONS if iteration < config.demonstrations_until else REPLAY
        for block, payloads in inputs.items():
            self._read(block)
            for columns in cast("list[Columns]", payloads):
                self._require_alike(block, columns)
                self._buffers[block, name].add({key: column.cpu() for key, column in columns.items()})
        batches = {block: self._batches(block, iteration) for block in inputs}
        size = lambda name: sum(len(self._buffers[block, name]) for block in inputs)  # noqa: E731
        return Output(batches, ReplayReport(size(REPLAY), size(DEMONSTRATIONS)))

    def _read(self, block: int) -> None:
        """Reads a block's recorded transitions, once."""
        config, buffer = self._config, self._buffers[block, DEMONSTRATIONS]
        if config.data and not len(buffer):
            found = recorded_block(config.data, config.columns, block, self._num_blocks)
            number = len(next(iter(found.values())))
            buffer = self._buffers[block, DEMONSTRATIONS] = ReplayBuffer(max(number, config.capacity))
            buffer.add(found)

    def _require_alike(self, block: int, columns: Columns) -> None:
        sizes = self._buffers[block, DEMONSTRATIONS].sizes
        ours = {name: tuple(column.shape[1:]) for name, column in columns.items()}
        if sizes and sizes != ours:
            raise DataError(
                f"data is {', '.join(self._config.data)}, whose transitions have sizes {sizes}, but those of this env "
                f"have {ours}: give recordings of the same env, with its env.* as they were"
            )

    def _batches(self, block: int, iteration: int) -> Columns:
        config = self._config
        if iteration < config.first_update:
            return {}
        own, demonstrations = (self._buffers[block, name] for name in (REPLAY, DEMONSTRATIONS))
        rows = config.demonstration_rows if len(own) else config.rows
        rows = rows if len(demonstrations) else 0
        parts = [
            buffer.draw((config.updates, number), config.seed, name, block, iteration)
            for buffer, number, name in ((own, config.rows - rows, REPLAY), (demonstrations, rows, DEMONSTRATIONS))
            if number
        ]
        return {name: torch.cat([part[name] for part in parts], 1) for name in config.columns}

    # ------------------------------------------------------------------------------------------------------------ state
    def export_snapshot(self, step_context: StepContext) -> dict[str, Tensor]:
        """Returns what the worker's blocks gathered, as <block>.<replay or demonstrations>.<column>."""
        return {
            f"{block}.{name}.{column}": tensor
            for (block, name), buffer in self._buffers.items()
            if not (name == DEMONSTRATIONS and self._config.data)
            for column, tensor in buffer.export_state().items()
        }

    def state_part(self, step_context: StepContext) -> StagePart:
        """Returns what a checkpoint holds of the worker's blocks."""
        held = self.export_snapshot(step_context)
        return StagePart({REPLAY: held} if held else {})

    def load(self, step_context: StepContext, folder: str) -> None:
        """Restores the worker's blocks from a checkpoint."""
        self._import(load_tensors(Path(folder), REPLAY))

    def _import(self, tensors: Mapping[str, Tensor]) -> None:
        for block, name in self._buffers:
            start = f"{block}.{name}."
            state = {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}
            buffer = self._buffers[block, name] = self._empty()
            buffer.import_state(state)

    def import_snapshot(self, step_context: StepContext, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Goes on from what all workers held."""
        self._import({name: tensor for part in parts for name, tensor in part.items()})
