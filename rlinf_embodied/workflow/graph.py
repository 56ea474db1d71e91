"""The macro flow: stages, edges and loops of a workflow, declared without instantiating anything.

env <==> policy      loop "rollout": H chunk-steps of P shards, possibly repeated
 |         |
 +-> actor <-+       data edges, block by block
       |
       +~~> policy   weight edge: a new policy version
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlinf_embodied.errors import PlanError

CORES = ("cpu",)  # `kinds` of a stage that runs on cores only


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A logical component as plain data; `target` is the dotted path of the Stage class, `config` its only argument."""

    name: str
    target: str
    config: object
    collective: bool = False  # its workers exchange data among themselves, so their calls start together
    kinds: tuple[str, ...] = ()  # device kinds that it can run on; (): all kinds in its profile
    whole: bool = False  # it is called once, for all blocks of a worker
    at_once: bool = False  # it works on all its blocks at once and passes each on when it is finished (long tails)
    waits: bool = False  # it waits for something outside the cluster, so a missing core does not slow it down
    blocks_per_batch: int = 1  # number of neighbouring blocks that form one batch, in one worker
    devices_per_worker: int = 1  # neighbouring devices that each worker uses: its own, and others lent to it
    lent: str = "rlinf_embodied.runtime.host.Lent"  # class of the stage on lent devices

    def devices_of(self, worker: int) -> range:
        return range(worker, worker + self.devices_per_worker)


@dataclass(frozen=True, slots=True)
class Edge:
    """Data of `source` that `target` consumes, one payload per block."""

    source: str
    target: str
    whole: bool = True  # `target` starts when it has all blocks; False: chunk by chunk


@dataclass(frozen=True, slots=True)
class WeightEdge:
    """Weights of `source` that `target` installs once per iteration, with version and checksum.

    With `changes` the target keeps a separate copy in every worker, even in workers that also host the source, and
    receives only what changed since the previous version.  A source has at most one such edge.
    """

    source: str
    target: str
    changes: bool = False


@dataclass(frozen=True, slots=True)
class RepeatDecision:
    """What a repeat decides after a round: stop or not, and the message to downstream stages."""

    enough: bool
    message: object = None


@dataclass(frozen=True, slots=True)
class Loop:
    """A cycle of two stages for `chunk_steps` turns: `opener` observes, `answerer` acts."""

    name: str
    opener: str
    answerer: str
    chunk_steps: int
    shards: tuple[int, ...] = (
        1,
        2,
    )  # numbers of shards to choose from: parts of the blocks that are in flight together
    typical_steps: int = 0  # of an episode, if rows whose episode ends are reset at once; 0: they wait

    @property
    def sides(self) -> tuple[str, str]:
        return self.opener, self.answerer

    def hops(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.opener, self.answerer), (self.answerer, self.opener)


@dataclass(frozen=True, slots=True)
class Repeat:
    """All stages upstream of a stage, repeated until it has enough data; at most `max_rounds` times.

    After each round `decide` gets the reports of the stage `decided_by` from all rounds so far (a list per round, in
    order of workers).  The stage `before` and those downstream of it get the data of all rounds and the decision's
    message.
    """

    name: str
    before: str | None  # None: all stages are repeated
    decided_by: str
    decide: Callable[[Sequence[Sequence[object]]], RepeatDecision]
    max_rounds: int
    expected_rounds: float = 1.0  # the planner's assumption


@dataclass(frozen=True, slots=True)
class Workflow:
    """The macro graph.  Items are blocks, numbered 0 .. num_blocks - 1; every stage processes every block."""

    name: str
    num_blocks: int
    stages: Mapping[str, StageSpec]
    edges: tuple[Edge, ...] = ()
    weight_edges: tuple[WeightEdge, ...] = ()
    loops: Mapping[str, Loop] = field(default_factory=dict)
    repeat: Repeat | None = None
    items_per_block: int = 1  # episodes, prompts: the unit in which profiles count
    typical_iteration: int = 0  # the first whose work is like that of later ones; stages are measured in it
    more_blocks: str = "make more and smaller blocks"  # how a user gets more blocks, for error messages
    of_workload: str = ""  # dotted path of the function that rebuilds the graph from a profile (planning/profile.py)

    def __post_init__(self) -> None:
        """Checks that every name is declared, loops are bounded and data edges have no cycle outside the loops.

        Raises:
            PlanError: names the edge or loop and what is wrong with it.
        """
        for problem in self._problems():
            raise PlanError(f"workflow {self.name}: {problem}")
        self.order()

    def _problems(self) -> Iterator[str]:
        if self.num_blocks < 1:
            yield f"num_blocks is {self.num_blocks}, but a workflow needs at least one: use more"
        ends = [
            (f"edge {edge.source} -> {edge.target}", stage)
            for edge in (*self.edges, *self.weight_edges)
            for stage in (edge.source, edge.target)
        ]
        ends += [(f"loop {loop.name}", side) for loop in self.loops.values() for side in loop.sides]
        repeat = self.repeat
        ends += [] if repeat is None else [(f"repeat {repeat.name}", repeat.before or repeat.decided_by)]
        for what, stage in ends:
            if stage not in self.stages:
                yield f"{what} names the stage {stage!r}, but there are only {sorted(self.stages)}: declare it"
        for loop in self.loops.values():
            yield from self._problems_of(loop)
        if repeat is not None and repeat.decided_by not in (upstream := self.repeated()):
            yield (
                f"repeat {repeat.name} is decided by {repeat.decided_by}, whose data does not reach {repeat.before}: "
                f"set decided_by to one of {sorted(upstream)}"
            )
        if repeat is None or repeat.before is None:
            return
        before, where = repeat.before, f"repeat {repeat.name}"
        if not self.stages[before].whole or self.loop_of(before) is not None:
            yield f"{where}: {before} waits for all rounds: give it whole=True, and leave it out of loops"
        if unconnected := set(self.stages) - self.upstream(before) - {before} - self.downstream(before):
            yield (
                f"{where}: {sorted(unconnected)} are neither upstream nor downstream of {before}, so it is undefined "
                "whether they are repeated: add an edge from or to them"
            )

    def _problems_of(self, loop: Loop) -> Iterator[str]:
        where = f"loop {loop.name}"
        if loop.opener == loop.answerer:
            yield f"{where} has {loop.opener!r} on both sides, but a loop consists of two stages: name both"
        for other in self.loops.values():
            if other is not loop and (shared := set(loop.sides) & set(other.sides)):
                yield f"{where} shares {sorted(shared)} with {other.name}: give each loop its own stages"
        if loop.chunk_steps < 1:
            yield f"{where} has chunk_steps={loop.chunk_steps}, but a loop needs at least one: set it"
        if sources := [e.source for e in self.edges if e.target == loop.answerer and e.source != loop.opener]:
            yield (
                f"{where}: {loop.answerer} takes data of {sources}, but only the opener of a loop receives data from "
                f"outside it: let the edge end at {loop.opener}"
            )

    def repeated(self) -> set[str]:
        if self.repeat is None:
            return set()
        return set(self.stages) if self.repeat.before is None else self.upstream(self.repeat.before)

    def loop_of(self, stage: str) -> Loop | None:
        return next((loop for loop in self.loops.values() if stage in loop.sides), None)

    def of_cores(self) -> tuple[str, ...]:
        """Returns the stages that run on cores only, even on machines with accelerators."""
        return tuple(name for name, spec in self.stages.items() if spec.kinds == CORES)

    def sources(self, stage: str) -> tuple[str, ...]:
        return tuple(edge.source for edge in self.edges if edge.target == stage)

    def downstream(self, *stages: str) -> set[str]:
        """Returns the stages that data of these reaches, excluding themselves; both sides of a loop, or neither."""
        return self._reached(set(stages)).difference(stages)

    def upstream(self, stage: str) -> set[str]:
        """Returns the stages whose data reaches this one, excluding itself; both sides of a loop, or neither."""
        return self._reached({stage}, backwards=True) - {stage}

    def _reached(self, start: set[str], backwards: bool = False) -> set[str]:
        pairs = [(edge.source, edge.target) for edge in self.edges]
        pairs += [hop for loop in self.loops.values() for hop in loop.hops()]
        pairs = [(b, a) for a, b in pairs] if backwards else pairs
        reached = set(start)
        while new := {b for a, b in pairs if a in reached} - reached:
            reached |= new
        return reached

    def back(self) -> frozenset[str]:
        """Returns the stages that learn and all stages downstream of them: the second part of an iteration.

        The other stages, its front, may run ahead.  Both stages of a loop are in the same part.  The sources of weight
        edges learn, and so do collective stages, such as a critic.
        """
        learning = {edge.source for edge in self.weight_edges}
        learning |= {name for name, spec in self.stages.items() if spec.collective} if learning else set()
        return frozenset(self._reached(learning))

    def rounds(self, reports: Mapping[str, Sequence[Sequence[object]]]) -> dict[str, int]:
        """Returns how often each repeated stage ran, from an iteration's reports by stage."""
        return dict.fromkeys(self.repeated(), len(reports[self.repeat.decided_by])) if self.repeat else {}

    def expected_rounds(self) -> dict[str, float]:
        return dict.fromkeys(self.repeated(), self.repeat.expected_rounds) if self.repeat else {}

    def with_rounds(self, expected: float, most: int | None = None) -> Workflow:
        """Returns the workflow with this number of expected rounds, limited to `most` or what its repeat allows."""
        if self.repeat is None:
            return self
        most = most or self.repeat.max_rounds
        within = min(max(expected, 1.0), most)
        return replace(self, repeat=replace(self.repeat, max_rounds=most, expected_rounds=within))

    def most_devices(self, stage: str, blocks: int = 0) -> int:
        """Returns how many devices can share a stage that is called for this number of blocks; 0: all blocks."""
        spec = self.stages[stage]
        size = spec.blocks_per_batch
        calls = (blocks or self.num_blocks) if size == 1 else self.num_blocks // size
        return calls * spec.devices_per_worker

    def blocking(self, stages: Sequence[str]) -> list[str]:
        """Returns the edges among these stages that prevent streaming between them."""
        inside = [edge for edge in self.edges if edge.source in stages and edge.target in stages]
        return [f"edge {edge.source} -> {edge.target}" for edge in inside if edge.whole]

    def order(self) -> tuple[str, ...]:
        """Returns the stages sorted along the data edges.

        Raises:
            PlanError: the edges form a cycle.
        """
        before: dict[str, set[str]] = {stage: set(self.sources(stage)) for stage in self.stages}
        done: list[str] = []
        while len(done) < len(self.stages):
            ready = [s for s in self.stages if s not in done and before[s].issubset(done)]
            if not ready:
                cyclic = sorted(set(self.stages) - set(done))
                raise PlanError(f"workflow {self.name}: the edges among {cyclic} form a cycle: declare it as a loop")
            done.extend(ready)
        return tuple(done)
