"""What a plan takes, call by call: the definition of its price.

The calls of schedule.py are gone through in the order in which the executor submits them.  A worker takes its calls in
that order, so that one pass suffices:

    start    of a call: when its device has done the calls before it, and the data of its blocks has arrived
    arrival  each device sends, and each receives, one block after the other; what stays in its worker is there at once
    switch   before a call, where a stage is in the device's memory that may not be there together with the called one
    loop     the same, chunk-step by chunk-step and shard by shard; one call per worker where both sides share workers
    weights  at the end, from one worker of the source to all of the target's that do not host both

tests/execution/test_emulation.py holds this against the real executor with stages that only keep time.  Time starts at
0, in the state that the iteration before has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rlinf_embodied.flow import cost
from rlinf_embodied.flow.calls import Layout, Link, links
from rlinf_embodied.flow.graph import Loop
from rlinf_embodied.flow.plan import Devices, Leaf, LoopNode, Node, Plan
from rlinf_embodied.flow.pricing import Pricer
from rlinf_embodied.flow.schedule import Step, schedule
from rlinf_embodied.telemetry.trace import Span

Parts = tuple[tuple[int, float, float], ...]  # what a call waits for: (call, seconds until it leaves, on the wire)


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came out of one iteration."""

    iteration_s: float
    busy_s: dict[int, float]  # by device: in calls, switches and weights
    stages_s: dict[str, float]  # by stage, on its busiest device: in calls
    spans: tuple[Span, ...] = ()

    def idle_share(self, device: int) -> float:
        """Returns the share of the iteration in which a device does nothing."""
        return 1.0 - self.busy_s.get(device, 0.0) / self.iteration_s if self.iteration_s else 0.0


@dataclass(slots=True)
class _State:
    """Clocks by device; when each call of a stage ended, and who made which block; which stages are switched out."""

    free_s: list[float]
    ends: dict[str, list[float]] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    offloaded: set[tuple[str, int]] = field(default_factory=set)
    calls_s: dict[tuple[str, int], float] = field(default_factory=dict)
    other_s: dict[int, float] = field(default_factory=dict)
    spans: list[Span] | None = None


class Simulator:
    """Simulates plans of one workflow, profile and cluster; what many plans have in common is remembered."""

    def __init__(self, pricer: Pricer) -> None:
        """Takes the times of single calls and wires."""
        self.pricer, profile = pricer, pricer.profile
        stages = {
            name: replace(spec, at_once=spec.at_once or bool(profile.stages[name].finish_quantiles))
            for name, spec in pricer.workflow.stages.items()
        }
        self.work = replace(pricer.workflow, stages=stages)
        self._rounds = pricer.workflow.expected_rounds() if pricer.workflow.repeat else {}
        self.num_calls = 0  # simulated so far
        self._layouts: dict[tuple[str, Devices, int], Layout] = {}
        self._links: dict[tuple[int, int, tuple[str, str]], list[Parts]] = {}
        self._seconds: dict[tuple[str, int, int, int], float] = {}
        self._ends = [devices.stop for devices in pricer.cluster.group_devices()]
        self._nodes = [pricer.cluster.place_of(d).node for d in range(pricer.cluster.num_devices)]
        self._classes = [sum(d >= end for end in self._ends) for d in range(pricer.cluster.num_devices)]

    def run(self, tree: Node, traced: bool = False) -> Simulation:
        """Returns what happens in one iteration of a plan tree; it takes inf seconds where a stage cannot run."""
        plan = Plan("", self.pricer.cluster.num_devices, tree)
        steps, exclusive = schedule(plan, self.work), plan.exclusive()
        state = self._iteration(plan, steps, exclusive, set(), None)
        if state.offloaded or traced:  # what the iteration before has left in memory
            state = self._iteration(plan, steps, exclusive, state.offloaded, [] if traced else None)
        stages: dict[str, float] = {}
        busy = dict(state.other_s)
        for (stage, device), seconds in state.calls_s.items():
            stages[stage] = max(stages.get(stage, 0.0), seconds)
            busy[device] = busy.get(device, 0.0) + seconds
        return Simulation(max(state.free_s), busy, stages, tuple(state.spans or ()))

    def _iteration(
        self,
        plan: Plan,
        steps: Sequence[Step],
        exclusive: dict[str, frozenset[str]],
        offloaded: set[tuple[str, int]],
        spans: list[Span] | None,
    ) -> _State:
        state = _State([0.0] * plan.num_devices, offloaded=set(offloaded), spans=spans)
        for step in steps:
            if step.chunk == 0:
                self._place(step, state)
        for step in steps:
            if isinstance(step.node, LoopNode):
                self._loop(step.node, exclusive, state)
            else:
                self._leaf(step, step.node, exclusive, state)
        for edge in self.work.weight_edges:
            self._weights(edge.source, edge.target, exclusive, state)
        return state

    def _place(self, step: Step, state: _State) -> None:
        """Notes the calls that a stage, or both sides of a loop, will come in."""
        node = step.node
        if isinstance(node, LoopNode):
            shards = 1 if self._is_fused(node) else node.shards
            layouts = {leaf.stage: self.layout(leaf.stage, leaf.devices, shards, shards=True) for leaf in node.stages}
        else:
            layouts = {node.stage: self.layout(node.stage, node.devices, step.num_chunks)}
        state.layouts |= layouts
        state.ends |= {stage: [0.0] * len(layout.devices) for stage, layout in layouts.items()}

    # ------------------------------------------------------------------------------------------------ facts of calls
    def seconds(self, stage: str, blocks: int, num_devices: int, device: int) -> float:
        """Returns the seconds of a call (or chunk-step) for so many blocks on one of `num_devices` devices."""
        key = (stage, blocks, num_devices, self._classes[device])
        if key not in self._seconds:
            measured = self.pricer.profile.stages[stage]
            one = float(measured.call_s(blocks * self.work.items_per_block, num_devices))
            slowdown = self.pricer.slowdown_on(stage, device)
            self._seconds[key] = one * slowdown * self._rounds.get(stage, 1.0)
        return self._seconds[key]

    def busy_s(self, stage: str, devices: Devices, chunks: int) -> dict[int, float]:
        """Returns how long a stage in so many chunks, or a side of a loop, works on each of its devices at least."""
        loop = next((o for o in self.work.loops.values() if stage in (o.opener, o.answerer)), None)
        streams = bool(self.pricer.profile.stages[stage].finish_quantiles)
        layout = self.layout(stage, devices, 1 if streams or loop else chunks, shards=loop is not None)
        times = 1.0 if loop is None else loop.chunk_steps * loop.expected_rounds
        if self.pricer.overlap_in_worker and loop is not None:
            return dict.fromkeys(layout.hosts, 0.0)
        found: dict[int, float] = {}
        for size, device in zip(layout.sizes, layout.devices, strict=True):
            found[device] = found.get(device, 0.0) + times * self.seconds(stage, size, len(layout.hosts), device)
        return found

    def layout(self, stage: str, devices: Devices, parts: int, shards: bool = False) -> Layout:
        """Returns the calls of a stage: for each of `parts` chunks, or shards of a loop."""
        key = (stage, devices, -parts if shards else parts)
        if key not in self._layouts:
            blocks, together = self.work.num_blocks, self.work.stages[stage].blocks_per_batch
            make = Layout.of_shards if shards else Layout.of_chunks
            self._layouts[key] = make(devices, blocks, parts, together)
        return self._layouts[key]

    def _parts(self, source: Layout, target: Layout, edge: tuple[str, str]) -> list[Parts]:
        """Returns what each call of a target waits for of a source's calls."""
        key = (id(source), id(target), edge)
        if key not in self._links:
            size = self.pricer.edge_bytes(*edge) * self.work.items_per_block
            found = links(source, target)
            self._links[key] = [
                tuple(self._wired(link, source, device, size) for link in of_call)
                for device, of_call in zip(target.devices, found, strict=True)
            ]
        return self._links[key]

    def _wired(self, link: Link, source: Layout, device: int, size: float) -> tuple[int, float, float]:
        maker = source.devices[link.call]
        if maker == device or not size:
            return link.call, 0.0, 0.0
        wire = size / self._rate(maker, device)
        return link.call, link.place * wire + self.pricer.cluster.links.latency_s, link.blocks * wire

    def _rate(self, a: int, b: int) -> float:
        wires = self.pricer.cluster.links
        return wires.within_node_bytes_per_s if self._nodes[a] == self._nodes[b] else wires.across_nodes_bytes_per_s

    # -------------------------------------------------------------------------------------------------------- leaves
    def _leaf(self, step: Step, leaf: Leaf, exclusive: dict[str, frozenset[str]], state: _State) -> None:
        stage, chunks, layout = leaf.stage, step.num_chunks, state.layouts[leaf.stage]
        if step.chunk == 0:
            self._enter([stage], layout.hosts, exclusive, state)
        waits = [
            (state.ends[source], self._parts(state.layouts[source], layout, (source, stage)))
            for source in self.work.sources(stage)
        ]
        calls = layout.groups[step.chunk]
        self.num_calls += len(calls)
        streams = chunks > 1 and bool(self.pricer.profile.stages[stage].finish_quantiles)
        begins = [max(state.free_s[layout.devices[c]], _arrival([(e, p[c]) for e, p in waits])) for c in calls]
        if streams:
            lengths = [self._streamed_s(stage, layout, c, chunks) for c in calls]
        else:
            hosts = len(layout.hosts)
            lengths = [self.seconds(stage, layout.sizes[c], hosts, layout.devices[c]) for c in calls]
        if self.work.stages[stage].collective:
            begins, lengths = [max(begins)] * len(begins), [max(lengths)] * len(lengths)
        for call, begin, length in zip(calls, begins, lengths, strict=True):
            state.ends[stage][call] = _work(stage, layout.devices[call], begin, length, state, step.chunk)

    def _streamed_s(self, stage: str, layout: Layout, call: int, chunks: int) -> float:
        """Returns the further seconds until a call's blocks are finished: all of the device's are begun at once."""
        device, share = layout.devices[call], self.pricer.profile.stages[stage].finish_share
        own = [c for c in range(len(layout.devices)) if layout.devices[c] == device]
        owned = sum(layout.sizes[c] for c in own)
        before = sum(layout.sizes[c] for c in own if c < call) / owned
        after = float(share(before + layout.sizes[call] / owned)) - (float(share(before)) if before else 0.0)
        return self.seconds(stage, owned, len(layout.hosts), device) * after

    # --------------------------------------------------------------------------------------------------------- loops
    def _is_fused(self, node: LoopNode) -> bool:
        plan = Plan("", self.pricer.cluster.num_devices, node)
        return plan.is_fused(node.loop, self.work.num_blocks, self.pricer.cluster)

    def _loop(self, node: LoopNode, exclusive: dict[str, frozenset[str]], state: _State) -> None:
        loop = self.work.loops[node.loop]
        opener, answerer = state.layouts[loop.opener], state.layouts[loop.answerer]
        hosts = sorted({*opener.hosts, *answerer.hosts})
        self._enter([loop.opener, loop.answerer], hosts, exclusive, state)
        start_s = min(state.free_s[device] for device in hosts)
        self._open(loop, opener, state)
        if self._is_fused(node):
            self._fused(loop, opener, node.shards, state)
        else:
            self._stepwise(loop, opener, answerer, state)
        if loop.expected_rounds != 1:
            self._repeat(loop, hosts, start_s, state)

    def _open(self, loop: Loop, opener: Layout, state: _State) -> None:
        """Shows what there is at the start, once what comes before the loop is there."""
        sources = [s for s in self.work.sources(loop.opener) if s != loop.answerer]
        waits = [(state.ends[s], self._parts(state.layouts[s], opener, (s, loop.opener))) for s in sources]
        for call, device in enumerate(opener.devices):
            begin = max(state.free_s[device], _arrival([(e, p[call]) for e, p in waits]))
            state.free_s[device] = state.ends[loop.opener][call] = begin

    def _fused(self, loop: Loop, layout: Layout, shards: int, state: _State) -> None:
        """One call per worker."""
        fraction = self.pricer.profile.stages[loop.answerer].bootstrap_fraction
        overlaps, hosts = self.pricer.overlap_in_worker and shards > 1, len(layout.hosts)
        for call, device in enumerate(layout.devices):
            blocks = -(-layout.sizes[call] // shards) if overlaps else layout.sizes[call]
            e, p = (self.seconds(stage, blocks, hosts, device) for stage in (loop.opener, loop.answerer))
            steps = loop.chunk_steps
            if overlaps:
                whole = float(cost.loop_disaggregated_s(steps, shards, e, p, 0.0, 0.0, p * fraction))
                state.free_s[device] = end = state.free_s[device] + whole
                for stage, seconds in ((loop.opener, e), (loop.answerer, p)):
                    _note(stage, device, end - seconds * steps * shards, end, state, 0)
            else:
                _work(loop.answerer, device, state.free_s[device], p * (steps + fraction), state, 0)
                end = _work(loop.opener, device, state.free_s[device], e * steps, state, 0)
            state.ends[loop.opener][call] = state.ends[loop.answerer][call] = end

    def _stepwise(self, loop: Loop, opener: Layout, answerer: Layout, state: _State) -> None:
        """A call per chunk-step, shard and worker; once every step adds the same, the rest is added at once."""
        up = self._parts(opener, answerer, (loop.opener, loop.answerer))
        down = self._parts(answerer, opener, (loop.answerer, loop.opener))
        shown, answered = state.ends[loop.opener], state.ends[loop.answerer]
        lengths = [
            [self.seconds(stage, n, len(side.hosts), d) for n, d in zip(side.sizes, side.devices, strict=True)]
            for stage, side in ((loop.opener, opener), (loop.answerer, answerer))
        ]
        hosts = sorted({*opener.hosts, *answerer.hosts})
        last: list[float] = []
        for step in range(loop.chunk_steps):
            for shard in range(len(opener.groups)):
                self._exchange(loop.answerer, answerer, shard, (shown, up), answered, lengths[1], state, step)
                self._exchange(loop.opener, opener, shard, (answered, down), shown, lengths[0], state, step)
            now = [*(state.free_s[d] for d in hosts), *shown]
            added = [b - a for a, b in zip(last, now, strict=True)] if last else []
            left = loop.chunk_steps - step - 1
            if added and left and max(added) - min(added) <= 1e-12 * max(now) and state.spans is None:
                _skip(left, added[0], hosts, (shown, answered), state)
                for stage, side, seconds in ((loop.opener, opener, lengths[0]), (loop.answerer, answerer, lengths[1])):
                    for call, device in enumerate(side.devices):
                        state.calls_s[stage, device] += left * seconds[call]
                break
            last = now
        fraction = self.pricer.profile.stages[loop.answerer].bootstrap_fraction
        valued = [seconds * fraction for seconds in lengths[1]]
        for shard in range(len(opener.groups)):
            args = (answered, valued, state, loop.chunk_steps)
            self._exchange(loop.answerer, answerer, shard, (shown, up), *args)
            for call in opener.groups[shard]:
                shown[call] = state.free_s[opener.devices[call]]

    def _exchange(
        self,
        stage: str,
        layout: Layout,
        shard: int,
        waits: tuple[list[float], list[Parts]],
        ends: list[float],
        lengths: list[float],
        state: _State,
        step: int,
    ) -> None:
        """One call of a loop's stage for a shard, on all workers that hold blocks of it."""
        self.num_calls += len(layout.groups[shard])
        for call in layout.groups[shard]:
            begin = _arrival([(waits[0], waits[1][call])])
            ends[call] = _work(stage, layout.devices[call], begin, lengths[call], state, step)

    def _repeat(self, loop: Loop, hosts: Sequence[int], start_s: float, state: _State) -> None:
        """Stretches a round to the expected ones; the driver waits for a round before it submits the next one."""
        end_s = max(state.free_s[device] for device in hosts)
        more = (end_s - start_s) * (loop.expected_rounds - 1)
        for device in hosts:
            state.free_s[device] += more
        for stage in (loop.opener, loop.answerer):
            state.ends[stage] = [end + more for end in state.ends[stage]]
            for device in hosts:
                if (stage, device) in state.calls_s:
                    state.calls_s[stage, device] *= loop.expected_rounds

    # --------------------------------------------------------------------------------------------- switches, weights
    def _enter(
        self, stages: Sequence[str], hosts: Iterable[int], exclusive: dict[str, frozenset[str]], state: _State
    ) -> None:
        """Brings stages into memory after those that exclude them have left; see runtime/residents.py."""
        if not any(exclusive[stage] for stage in stages):
            return
        known = self.pricer.profile.stages
        for device in hosts:
            for stage in stages:
                if device not in state.layouts[stage].hosts:
                    continue
                for other in sorted(exclusive[stage]):
                    hosted = device in state.layouts[other].hosts
                    if hosted and (other, device) not in state.offloaded:
                        state.offloaded.add((other, device))
                        _busy(device, state.free_s[device], known[other].offload_s, state)
                if (stage, device) in state.offloaded:
                    state.offloaded.discard((stage, device))
                    _busy(device, state.free_s[device], known[stage].onload_s, state)

    def _weights(self, source: str, target: str, exclusive: dict[str, frozenset[str]], state: _State) -> None:
        sources, targets = state.layouts[source].hosts, state.layouts[target].hosts
        sharing = set() if self.pricer.cluster.always_store else set(sources)
        receivers = [device for device in targets if device not in sharing]
        measured = self.pricer.profile.weights.get((source, target))
        if not receivers:
            return
        sender = sources[0]
        self._enter([source], [sender], exclusive, state)
        sent = _busy(sender, state.free_s[sender], measured.export_s if measured else 0.0, state)
        for device in receivers:
            self._enter([target], [device], exclusive, state)
            wire = 0.0
            if measured and measured.bytes:
                wire = measured.bytes / self._rate(sender, device) + self.pricer.cluster.links.latency_s
            _busy(device, sent + wire, measured.install_s if measured else 0.0, state)


def _arrival(waits: Sequence[tuple[list[float], Parts]]) -> float:
    """Returns when everything that a call waits for is there."""
    here, sent = 0.0, []
    for ends, parts in waits:
        for call, delay, wire in parts:
            if wire:
                sent.append((ends[call] + delay, wire))
            elif ends[call] > here:
                here = ends[call]
    arrived = 0.0
    for left, wire in sorted(sent):
        arrived = max(arrived, left) + wire
    return max(here, arrived)


def _work(stage: str, device: int, begin_s: float, seconds: float, state: _State, number: int) -> float:
    """Occupies a device with a call and returns its end."""
    start = max(begin_s, state.free_s[device])
    end = state.free_s[device] = start + seconds
    _note(stage, device, start, end, state, number)
    return end


def _note(stage: str, device: int, start_s: float, end_s: float, state: _State, number: int) -> None:
    state.calls_s[stage, device] = state.calls_s.get((stage, device), 0.0) + end_s - start_s
    if state.spans is not None:
        state.spans.append(Span(stage, stage, device, f"device {device}", start_s, end_s, {"call": number}))


def _busy(device: int, begin_s: float, seconds: float, state: _State) -> float:
    """Occupies a device with something that is no call of a stage."""
    end = state.free_s[device] = max(begin_s, state.free_s[device]) + seconds
    state.other_s[device] = state.other_s.get(device, 0.0) + seconds
    return end


def _skip(steps: int, each_s: float, hosts: Iterable[int], ends: Iterable[list[float]], state: _State) -> None:
    for device in hosts:
        state.free_s[device] += steps * each_s
    for times in ends:
        times[:] = [end + steps * each_s for end in times]


def simulate(tree: Node, pricer: Pricer, traced: bool = True) -> Simulation:
    """Returns what happens in one iteration of a plan tree, with a span for every call if `traced`."""
    return Simulator(pricer).run(tree, traced)
