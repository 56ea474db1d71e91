"""Which steps of a plan a repeat does again, and how a loop's blocks are divided among its shards."""

from __future__ import annotations

from rlinf_embodied.planning.plan import Step, schedule
from rlinf_embodied.workflow.graph import Workflow

__all__ = ["Step", "parts", "schedule", "shards_of"]


def parts(steps: tuple[Step, ...], workflow: Workflow) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Returns the steps that a repeat does again, and those behind them."""
    again = workflow.repeated()
    inside = tuple(step for step in steps if again.issuperset(step.stages))
    assert inside == steps[: len(inside)], "the stage behind a repeat is called once, after all that reaches it"
    return inside, steps[len(inside) :]


def shards_of(blocks: tuple[int, ...], num_shards: int) -> tuple[tuple[int, ...], ...]:
    """Returns `blocks` in `num_shards` shards, round robin.

    Contiguous pieces of an opener's blocks would fall to single workers of the answerer, which owns other contiguous
    blocks: its other workers would idle during that shard.  Round robin, both sides have an even part of every shard.
    """
    return tuple(tuple(block for block in blocks if block % num_shards == k) for k in range(num_shards))
