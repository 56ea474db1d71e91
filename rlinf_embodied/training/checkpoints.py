"""Checkpoints of runs whose workers do not share the driver's file system."""

from __future__ import annotations

from pathlib import Path

from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.learning.checkpoint import arrived


def bring_checkpoint(executor: Executor, stage: str, checkpoint: Path, keep: int) -> None:
    """Brings a checkpoint that the first worker of a stage wrote to the driver's node, if it was on another.

    A copy stays there.  What fails on the way leaves a checkpoint that is damaged, which a resuming run passes over.
    """
    if executor.collect(stage, checkpoint, of_first=True):
        arrived(checkpoint, keep)
