"""The nodes of a plan tree, Leaf | Temporal | Spatial | Loop, and walks over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlinf_embodied.workflow.graph import WHOLE, Loop

Devices = tuple[int, ...]
Shares = tuple[int, ...]  # blocks of each device, in the order of the devices; (): as even as possible


@dataclass(frozen=True, slots=True)
class Leaf:
    """One stage on its devices, each with its share of the blocks."""

    stage: str
    devices: Devices
    shares: Shares = ()


@dataclass(frozen=True, slots=True)
class LoopNode:
    """A loop of the workflow: each of its stages on its devices, with `shards` of the blocks in flight."""

    loop: str
    stages: tuple[Leaf, ...]
    shards: int


@dataclass(frozen=True, slots=True)
class Temporal:
    """Parts that take turns; they may share devices.

    Where they do not fit together (`resident` is false), the part whose turn ends leaves the devices' memory before the
    next one enters.
    """

    parts: tuple[Node, ...]
    resident: bool = True


@dataclass(frozen=True, slots=True)
class Spatial:
    """Parts on disjoint devices that stream to each other in chunks of `granularity` blocks (0: all at once)."""

    parts: tuple[Node, ...]
    granularity: int = WHOLE


Node = Leaf | LoopNode | Temporal | Spatial


def loop_node(loops: Sequence[Loop], places: Mapping[str, Leaf], shards: Sequence[int]) -> Node:
    """Returns the node of a loop, its sides in the order of their turns; of several that share a stage, as turns."""
    made = [LoopNode(o.name, tuple(places[s] for s in o.sides), n) for o, n in zip(loops, shards, strict=True)]
    return made[0] if len(made) == 1 else Temporal(tuple(made))


def nodes(node: Node) -> Iterator[Node]:
    """Yields a node and all nodes below it, from left to right."""
    yield node
    if isinstance(node, (Temporal, Spatial)):
        for part in node.parts:
            yield from nodes(part)


def leaves(node: Node) -> Iterator[Leaf]:
    """Yields the stages of a tree with their devices, those inside loops too, from left to right."""
    for inner in nodes(node):
        if isinstance(inner, Leaf):
            yield inner
        elif isinstance(inner, LoopNode):
            yield from inner.stages


def granularity(node: Node, stage: str) -> int | None:
    """Returns the granularity of the outermost chunked node around a stage; None where the stage is not below."""
    if isinstance(node, (Leaf, LoopNode)):
        return WHOLE if any(leaf.stage == stage for leaf in leaves(node)) else None
    inner = next((found for part in node.parts if (found := granularity(part, stage)) is not None), None)
    return node.granularity or inner if isinstance(node, Spatial) and inner is not None else inner
