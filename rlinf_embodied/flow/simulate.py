"""Runs a plan event by event with the times of a profile, as the executor would: the check on the formulas of cost.py.

    task        a stage's call for one chunk (or chunk-step and shard) on all of its devices
    resource    each device, the wire of each edge; first come, first served in the order of submission
    start       when its inputs are there and its devices are free; the wire then carries the result on

The spans have the form of a real run's trace.  Time starts at 0.  Where a plan keeps not all stages resident, switching
is a task too, also the one back to the first stage at the end, since iterations follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rlinf_embodied.flow.graph import Loop
from rlinf_embodied.flow.plan import Devices, Leaf, LoopNode, Node, Spatial, Temporal, leaves
from rlinf_embodied.flow.pricing import Pricer
from rlinf_embodied.telemetry.trace import Span


@dataclass(slots=True)
class _State:
    """Clocks of devices and wires, and when each stage's chunk is finished (also: everything of a node)."""

    free_s: dict[object, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def run(self, resources: Iterable[object], ready_s: float, seconds: float) -> tuple[float, float]:
        """Occupies resources from when all are free, and returns start and end."""
        names = list(resources)
        start = max([ready_s, *(self.free_s.get(name, 0.0) for name in names)])
        for name in names:
            self.free_s[name] = start + seconds
        return start, start + seconds


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came out: the spans, when the last work ended, and the iteration with switches back and new weights."""

    spans: tuple[Span, ...]
    work_s: float
    iteration_s: float
    busy_s: dict[int, float]  # by device

    def idle_share(self, device: int) -> float:
        """Returns the share of the iteration in which a device computes nothing."""
        return 1.0 - self.busy_s.get(device, 0.0) / self.iteration_s if self.iteration_s else 0.0


def simulate(tree: Node, pricer: Pricer, every_device: bool = True) -> Simulation:
    """Returns what happens in one iteration of a plan tree.

    Args:
        tree: what runs where.
        pricer: the times.
        every_device: whether each device of a stage has spans; otherwise its first one stands for all.

    Raises:
        AssertionError: the tree uses a stage where it cannot run, or streams along an edge that forbids it.
    """
    run = _Run(pricer, every_device)
    run.node(tree, [0.0], 1)
    work_s = max(run.state.free_s.values(), default=0.0)
    price = pricer.price(tree)
    assert np.isfinite(price.first_s).all(), "the plan cannot run"
    end_s = work_s + float(price.wrap_s[0]) + float(price.weights_s[0])
    busy: dict[int, float] = {}
    for span in run.state.spans:
        busy[span.worker] = busy.get(span.worker, 0.0) + span.end_s - span.start_s
    return Simulation(tuple(run.state.spans), work_s, end_s, busy)


class _Run:
    """One iteration; `done` holds for each stage when each of its chunks may be consumed."""

    def __init__(self, pricer: Pricer, every_device: bool) -> None:
        self.every_device = every_device
        self.pricer, self.work, self.state = pricer, pricer.workflow, _State()
        self.done: dict[str, list[float]] = {}
        self.devices: dict[str, Devices] = {}

    # ---------------------------------------------------------------------------------------------------------- nodes
    def node(self, node: Node, ready_s: list[float], chunks: int) -> list[float]:
        """Runs a node for `chunks` chunks, each not before `ready_s`, and returns when each chunk is out."""
        if isinstance(node, Leaf):
            return self.leaf(node, ready_s, chunks)
        if isinstance(node, LoopNode):
            return [self.loop(node, ready_s[0])]
        if isinstance(node, Temporal):
            return self.temporal(node, ready_s, chunks)
        inner = self.work.num_blocks // node.granularity if node.granularity and chunks == 1 else chunks
        ready = ready_s if inner == chunks else [ready_s[0]] * inner
        ends = [self.node(part, ready, inner) for part in node.parts]
        out = [max(times) for times in zip(*ends, strict=True)]
        return out if inner == chunks else [max(out)]

    def temporal(self, node: Temporal, ready_s: list[float], chunks: int) -> list[float]:
        """Parts take turns: chunk by chunk where their edges allow it, otherwise one part after the other."""
        if len(node.parts) > 2:  # a > b > c is (a > b) > c
            node = Temporal((Temporal(node.parts[:-1], node.resident), node.parts[-1]), node.resident)
        alternate = chunks > 1 and not self._has_barrier(node, chunks)
        if alternate:
            out = []
            for k in range(chunks):
                end = ready_s[k]
                for part in node.parts:
                    end = self._one_chunk(part, end, k, chunks)
                out.append(end)
            return out
        out = ready_s
        for i, part in enumerate(node.parts):
            if i:
                after = max(out)
                if not node.resident:
                    after = self._switch(node.parts[i - 1], part, after)
                ready_s = [after] * chunks
            out = self.node(part, ready_s, chunks)
        return out

    def _has_barrier(self, node: Node, chunks: int) -> bool:
        """Returns whether some part of a node finishes all chunks before another part of it starts."""
        if not isinstance(node, (Temporal, Spatial)):
            return False
        masks = [self._mask(part) for part in node.parts]
        pairs = [(sum(masks[:i]), masks[i]) for i in range(1, len(masks))]
        by_turns = isinstance(node, Temporal)
        barred = by_turns and not (node.resident and all(self.pricer.by_chunk(a, b, chunks) for a, b in pairs))
        return barred or any(self._has_barrier(part, chunks) for part in node.parts)

    def _one_chunk(self, node: Node, ready_s: float, k: int, chunks: int) -> float:
        """Runs the k-th chunk of a node only, when all of its devices are free."""
        if isinstance(node, Leaf):
            seconds = float(self.pricer.leaf(node.stage, self.pricer.counts_of(node.devices), chunks).first_s[0])
            return self._call(node, f"{node.stage} chunk {k}", self._inputs(node, k, chunks, ready_s), seconds, k)
        assert isinstance(node, (Temporal, Spatial)), "a loop is not chunked"
        ready_s = max([ready_s, *(self.state.free_s.get(d, 0.0) for d in self._devices(node))])
        ends = []
        for part in node.parts:
            end = self._one_chunk(part, ready_s, k, chunks)
            ready_s = max(ready_s, end) if isinstance(node, Temporal) else ready_s
            ends.append(end)
        return max(ends)

    def leaf(self, leaf: Leaf, ready_s: list[float], chunks: int) -> list[float]:
        """Runs a stage; one with a length distribution works on all at once and lets go of what is finished."""
        measured = self.pricer.profile.stages[leaf.stage]
        price = self.pricer.leaf(leaf.stage, self.pricer.counts_of(leaf.devices), chunks)
        first, period = float(price.first_s[0]), float(price.period_s[0])
        if measured.finish_quantiles and chunks > 1:
            start_s = max(self._inputs(leaf, k, chunks, ready_s[k]) for k in range(chunks))
            whole = first + (chunks - 1) * period
            end_s = self._call(leaf, leaf.stage, start_s, whole, chunks - 1)
            shares = measured.finish_share((np.arange(chunks) + 1) / chunks)
            self.done[leaf.stage] = [end_s - whole + whole * float(share) for share in shares]
            return self.done[leaf.stage]
        for k in range(chunks):
            self._call(leaf, f"{leaf.stage} chunk {k}", self._inputs(leaf, k, chunks, ready_s[k]), first, k)
        return self.done[leaf.stage]

    # ---------------------------------------------------------------------------------------------------------- loops
    def loop(self, node: LoopNode, ready_s: float) -> float:
        """Runs H chunk-steps of P shards; a repeat's expected rounds stretch the whole."""
        loop = self.work.loops[node.loop]
        sides = {leaf.stage: leaf for leaf in node.stages}
        opener, answerer = sides[loop.opener], sides[loop.answerer]
        self.devices |= {leaf.stage: leaf.devices for leaf in node.stages}
        ready_s = max(self._inputs(opener, 0, 1, ready_s), self._inputs(answerer, 0, 1, ready_s))
        start_s = max([ready_s, *(self.state.free_s.get(d, 0.0) for d in {*opener.devices, *answerer.devices})])
        before = len(self.state.spans)
        end_s = self._rounds(loop, opener, answerer, node.shards, start_s)
        longer = (end_s - start_s) * (loop.expected_rounds - 1)
        if longer:
            for device in {*opener.devices, *answerer.devices}:
                self.state.free_s[device] = end_s + longer
            self._stretch(before, start_s, loop.expected_rounds)
        for stage in (loop.opener, loop.answerer):
            self.done[stage] = [end_s + longer]
        return end_s + longer

    def _stretch(self, before: int, start_s: float, factor: float) -> None:
        """Draws expected rounds as one longer round."""
        spans = self.state.spans
        for i in range(before, len(spans)):
            s = spans[i]
            begin, end = (start_s + (t - start_s) * factor for t in (s.start_s, s.end_s))
            spans[i] = Span(s.name, s.stage, s.worker, s.device, begin, end, s.args)

    def _rounds(self, loop: Loop, opener: Leaf, answerer: Leaf, shards: int, start_s: float) -> float:
        facts = self.pricer.turn_seconds(loop, opener.devices, answerer.devices, shards)
        e, p, up, down, bootstrap = facts
        wires = (("wire", loop.name, "up"), ("wire", loop.name, "down"))
        at = [self._send(wires[0], start_s, up) for _ in range(shards)] if up else [start_s] * shards
        for step in range(loop.chunk_steps):
            for shard in range(shards):
                answered = self._turn(answerer, at[shard], p, step, shard)
                arrived = self._send(wires[1], answered, down)
                shown = self._turn(opener, arrived, e, step, shard)
                at[shard] = self._send(wires[0], shown, up)
        ends = [self._turn(answerer, at[shard], bootstrap, loop.chunk_steps, shard) for shard in range(shards)]
        return max(ends)

    def _turn(self, leaf: Leaf, ready_s: float, seconds: float, step: int, shard: int) -> float:
        start, end = self.state.run(leaf.devices, ready_s, seconds)
        self._span(f"{leaf.stage}.step", leaf, start, end, {"chunk_step": step, "shard": shard})
        return end

    def _send(self, wire: object, ready_s: float, seconds: float) -> float:
        return self.state.run([wire], ready_s, seconds)[1] if seconds else ready_s

    # --------------------------------------------------------------------------------------------------- small pieces
    def _inputs(self, leaf: Leaf, k: int, chunks: int, ready_s: float) -> float:
        """Returns when the k-th chunk of all inputs is there, each with its wire."""
        self.devices[leaf.stage] = leaf.devices
        for edge in self.work.edges:
            if edge.target != leaf.stage or self._same_loop(edge.source, edge.target):
                continue
            times = self.done[edge.source]
            made_s = times[k] if len(times) == chunks else max(times)
            seconds = self.pricer.edge_seconds(edge, self.devices[edge.source], leaf.devices, chunks)
            ready_s = max(ready_s, self._send(("wire", edge.source, edge.target), made_s, seconds))
        return ready_s

    def _same_loop(self, a: str, b: str) -> bool:
        return any({a, b} == {loop.opener, loop.answerer} for loop in self.work.loops.values())

    def _call(self, leaf: Leaf, name: str, ready_s: float, seconds: float, k: int) -> float:
        start, end = self.state.run(leaf.devices, ready_s, seconds)
        self._span(name, leaf, start, end, {"chunk": k})
        if k == 0 or len(self.done.get(leaf.stage, ())) != k:
            self.done[leaf.stage] = []
        self.done[leaf.stage].append(end)
        return end

    def _span(self, name: str, leaf: Leaf, start_s: float, end_s: float, args: dict[str, object]) -> None:
        shown = leaf.devices if self.every_device else leaf.devices[:1]
        self.state.spans += [Span(name, leaf.stage, d, f"device {d}", start_s, end_s, args) for d in shown]

    def _switch(self, leaving: Node, entering: Node, after_s: float) -> float:
        """Offloads what ran last and loads what runs next, on all of their devices."""
        out, into = self.pricer.price(leaving), self.pricer.price(entering)
        devices = {*self._devices(leaving), *self._devices(entering)}
        _, end = self.state.run(devices, after_s, float(out.leave_s[0]) + float(into.enter_s[0]))
        return end

    def _mask(self, node: Node) -> int:
        return sum(self.pricer.bits[leaf.stage] for leaf in leaves(node))

    def _devices(self, node: Node) -> set[int]:
        return {device for leaf in leaves(node) for device in leaf.devices}
