"""The replay buffer as a stage: it keeps each block's transitions and draws every update's part of a batch from them.

What it holds is named state: it is part of checkpoints and of the snapshot of an iteration's start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from rlinf_embodied.control.replay_buffer import ReplayBuffer
from rlinf_embodied.control.transitions import Columns
from rlinf_embodied.learning.checkpoint import load_tensors
from rlinf_embodied.runtime.host import Output, StageContext, StepContext

REPLAY = "replay"  # in a checkpoint


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """What the stage needs to know."""

    seed: int
    capacity: int  # transitions of a block
    rows: int  # of a block in a batch
    updates: int  # per iteration
    warmup_iterations: int  # without updates
    folder: str  # the checkpoint or policy that the run starts from: its files are brought to the stage's nodes


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What the driver learns: how many transitions the worker's blocks hold."""

    size: int


class ReplayStage:
    """Keeps and draws transitions, block by block."""

    def __init__(self, config: ReplayConfig) -> None:
        """Takes plain data."""
        self._config = config

    def setup(self, context: StageContext) -> None:
        """Starts with empty buffers."""
        self._buffers = {block: ReplayBuffer(self._config.capacity) for block in context.blocks}

    def run(self, step_context: StepContext, inputs: Mapping[int, list[object]]) -> Output:
        """Takes each block's transitions in and returns its part of every batch, columns [U, R, ...]; {} in warm-up."""
        for block, payloads in inputs.items():
            for columns in cast("list[Columns]", payloads):
                self._buffers[block].add({name: column.cpu() for name, column in columns.items()})
        batches = {block: self._batches(block, step_context.iteration) for block in inputs}
        return Output(batches, ReplayReport(sum(len(self._buffers[block]) for block in inputs)))

    def _batches(self, block: int, iteration: int) -> Columns:
        config = self._config
        if iteration < config.warmup_iterations:
            return {}
        return self._buffers[block].draw((config.updates, config.rows), config.seed, "replay", block, iteration)

    # ------------------------------------------------------------------------------------------------------------ state
    def export_state(self, step_context: StepContext) -> dict[str, Tensor]:
        """Returns what the worker's blocks hold, as <block>.<column>."""
        return {
            f"{block}.{name}": tensor
            for block, buffer in self._buffers.items()
            for name, tensor in buffer.export_state().items()
        }

    def load(self, step_context: StepContext, folder: str) -> None:
        """Restores the worker's blocks from a checkpoint."""
        self._import(load_tensors(Path(folder), REPLAY))

    def _import(self, tensors: Mapping[str, Tensor]) -> None:
        for block, buffer in self._buffers.items():
            start = f"{block}."
            buffer.import_state({n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)})

    def export_snapshot(self, step_context: StepContext) -> dict[str, Tensor]:
        """Returns what `export_state` does."""
        return self.export_state(step_context)

    def import_snapshot(self, step_context: StepContext, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Goes on from what all workers held."""
        self._import({name: tensor for part in parts for name, tensor in part.items()})
