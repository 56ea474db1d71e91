"""The macro flow: stages, edges and loops of a workflow, declared without instantiating anything.

env <==> policy      loop "rollout": H chunk-steps of P shards, possibly repeated
 |         |
 +-> actor <-+       data edges, block by block
       |
       +~~> policy   weight edge: a new policy version
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlinf_embodied.errors import PlanError


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A logical component as plain data; `target` is the dotted path of the Stage class, `config` its only argument."""

    name: str
    target: str
    config: object
    collective: bool = False  # its workers exchange data among themselves, so that their calls start as a gang


@dataclass(frozen=True, slots=True)
class Edge:
    """Data of `source` that `target` consumes, one payload per block."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class WeightEdge:
    """Weights of `source` that `target` installs once per iteration, with version and checksum."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a repeat decides after a round: stop or not, and what downstream stages are told."""

    enough: bool
    message: object = None


@dataclass(frozen=True, slots=True)
class Loop:
    """A cycle of two stages for `chunk_steps` turns: `opener` shows, `answerer` acts; at most `max_rounds` times over.

    After each round `judge` sees the opener's reports of all rounds so far (a list per round, in order of workers).
    """

    name: str
    opener: str
    answerer: str
    chunk_steps: int
    max_rounds: int = 1
    judge: Callable[[Sequence[Sequence[object]]], Verdict] | None = None


@dataclass(frozen=True, slots=True)
class Workflow:
    """The macro graph.  Items are blocks, numbered 0 .. num_blocks - 1; every stage processes every block."""

    name: str
    num_blocks: int
    stages: Mapping[str, StageSpec]
    edges: tuple[Edge, ...] = ()
    weight_edges: tuple[WeightEdge, ...] = ()
    loops: Mapping[str, Loop] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks that every name is declared, loops are bounded and data edges have no cycle outside the loops.

        Raises:
            PlanError: names the edge or loop and what is wrong with it.
        """
        for edge in (*self.edges, *self.weight_edges):
            for end in (edge.source, edge.target):
                if end not in self.stages:
                    raise PlanError(
                        f"workflow {self.name}: edge {edge.source} -> {edge.target} names the stage {end!r}, "
                        f"but there are only {sorted(self.stages)}: declare the stage or mend the edge"
                    )
        for loop in self.loops.values():
            for end in (loop.opener, loop.answerer):
                if end not in self.stages:
                    raise PlanError(f"workflow {self.name}: loop {loop.name} names the stage {end!r}: declare it")
            if loop.chunk_steps < 1 or loop.max_rounds < 1:
                raise PlanError(
                    f"workflow {self.name}: loop {loop.name} has chunk_steps={loop.chunk_steps} and "
                    f"max_rounds={loop.max_rounds}, but a loop is bounded by positive numbers: set both"
                )
        self.order()

    def sources(self, stage: str) -> tuple[str, ...]:
        """Returns the stages whose data `stage` consumes, in the order of the edges."""
        return tuple(edge.source for edge in self.edges if edge.target == stage)

    def order(self) -> tuple[str, ...]:
        """Returns the stages sorted along the data edges.

        Raises:
            PlanError: the data edges form a cycle.
        """
        done: list[str] = []
        while len(done) < len(self.stages):
            ready = [s for s in self.stages if s not in done and all(source in done for source in self.sources(s))]
            if not ready:
                left = sorted(set(self.stages) - set(done))
                raise PlanError(f"workflow {self.name}: the edges among {left} form a cycle: declare it as a loop")
            done.extend(ready)
        return tuple(done)
