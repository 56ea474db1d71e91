"""In which order a plan tree's calls are submitted: pure data, before anything runs.

    spatial, granularity g    every part is called once per chunk of g blocks; parts own disjoint devices, so that only
                              their inputs order them
    temporal, inside chunks   parts alternate chunk by chunk where all that passes between them may flow so; else the
                              first part does all its chunks, then the second
    temporal, otherwise       one part after the other

The order is topological along the data edges.  A worker takes its calls in this order, a call waits for its arguments,
and that is all that is needed: the order *is* the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_embodied.planning.plan import Leaf, LoopNode, Node, Plan, Spatial, Temporal, leaves
from rlinf_embodied.workflow.graph import Workflow


@dataclass(frozen=True, slots=True)
class Step:
    """One stage (or loop) called for one chunk of the blocks."""

    node: Leaf | LoopNode
    chunk: int = 0
    num_chunks: int = 1


@dataclass(frozen=True, slots=True)
class _Order:
    """Steps by chunk; `chunked` says whether a chunk may run through the whole node before the next one begins."""

    by_chunk: tuple[tuple[Step, ...], ...]
    chunked: bool = True

    def all(self) -> tuple[Step, ...]:
        return tuple(step for steps in self.by_chunk for step in steps)


def schedule(plan: Plan, workflow: Workflow) -> tuple[Step, ...]:
    """Returns the steps of one iteration in the order of their submission."""
    return _order(plan.tree, 1, workflow).all()


def _order(node: Node, chunks: int, workflow: Workflow) -> _Order:
    if isinstance(node, (Leaf, LoopNode)):
        return _Order(tuple((Step(node, k, chunks),) for k in range(chunks)))
    inner = chunks
    if isinstance(node, Spatial) and node.granularity and chunks == 1:
        inner = workflow.num_blocks // node.granularity
    order = _order(node.parts[0], inner, workflow)
    done = [leaf.stage for leaf in leaves(node.parts[0])]
    for part in node.parts[1:]:
        ours = [leaf.stage for leaf in leaves(part)]
        order = _joined(node, order, _order(part, inner, workflow), _alternates(node, done, ours, inner, workflow))
        done += ours
    return order if inner == chunks else _Order((order.all(),))


def _joined(node: Spatial | Temporal, first: _Order, second: _Order, alternates: bool) -> _Order:
    if first.chunked and second.chunked and (isinstance(node, Spatial) or alternates):
        return _Order(tuple(a + b for a, b in zip(first.by_chunk, second.by_chunk, strict=True)))
    chunks = len(first.by_chunk)
    rest = ((),) * (chunks - 1)  # everything is submitted before whatever follows chunk by chunk
    return _Order(((*first.all(), *second.all()), *rest), chunked=False)


def _alternates(node: Node, first: list[str], second: list[str], chunks: int, workflow: Workflow) -> bool:
    """Returns whether two parts of a temporal node take turns chunk by chunk."""
    if chunks == 1 or not isinstance(node, Temporal):
        return chunks == 1
    long_tailed = any(workflow.stages[stage].at_once for stage in (*first, *second))
    return node.resident and not long_tailed and not workflow.blocking(first, second, workflow.num_blocks // chunks)
