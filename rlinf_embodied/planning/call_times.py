"""When the calls of a plan begin and end: leaves, loops, switches and weights, in the order of their submission.

A worker takes its calls in that order, so that one pass suffices; see simulate.py for what holds of each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rlinf_embodied.planning import cost
from rlinf_embodied.planning.calls import Layout, Link, links
from rlinf_embodied.planning.clocks import Clocks, Parts, arrival
from rlinf_embodied.planning.plan import Leaf, LoopNode, Plan
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.schedule import Step
from rlinf_embodied.workflow.graph import Loop

Exclusive = Mapping[str, frozenset[str]]  # by stage: who may not be in memory together with it


class CallTimes:
    """Times the calls of plans of one workflow, profile and cluster; what many plans have in common is remembered."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer, profile = pricer, pricer.profile
        stages = {
            name: replace(spec, at_once=spec.at_once or bool(profile.stages[name].finish_quantiles))
            for name, spec in pricer.workflow.stages.items()
        }
        self.work = replace(pricer.workflow, stages=stages)
        self._rounds = pricer.workflow.expected_rounds() if pricer.workflow.repeat else {}
        self.num_calls = 0  # simulated so far
        self._layouts: dict[tuple[Leaf, int], Layout] = {}
        self._links: dict[tuple[int, int, tuple[str, str]], list[Parts]] = {}
        self._seconds: dict[tuple[str, int, int, int], float] = {}
        self._ends = [devices.stop for devices in pricer.cluster.group_devices()]
        self._nodes = [pricer.cluster.place_of(d).node for d in range(pricer.cluster.num_devices)]
        self._classes = [sum(d >= end for end in self._ends) for d in range(pricer.cluster.num_devices)]

    # ----------------------------------------------------------------------------------------------------- submission
    def layouts(self, steps: Iterable[Step]) -> dict[str, Layout]:
        """Returns the calls that each stage will come in."""
        found = {}
        for step in steps:
            node = step.node
            if step.chunk:
                continue
            if isinstance(node, LoopNode):
                shards = 1 if self._is_fused(node) else node.shards
                found |= {leaf.stage: self.layout(leaf, shards, shards=True) for leaf in node.stages}
            else:
                found[node.stage] = self.layout(node, step.num_chunks)
        return found

    def submit(self, steps: Iterable[Step], exclusive: Exclusive, clocks: Clocks) -> None:
        """Goes through some steps of an iteration, whose calls end when `clocks.ends` says then."""
        for step in steps:
            if isinstance(step.node, LoopNode):
                self._loop(step.node, exclusive, clocks)
            else:
                self._leaf(step, step.node, exclusive, clocks)

    def send_weights(self, exclusive: Exclusive, clocks: Clocks) -> float:
        """Goes through the weight edges and returns when all weights are in place, 0 where none have to be sent."""
        edges = self.work.weight_edges
        return max((self._weights(edge.source, edge.target, exclusive, clocks) for edge in edges), default=0.0)

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

    def busy_s(self, leaf: Leaf, chunks: int) -> dict[int, float]:
        """Returns how long a stage in so many chunks, or a side of a loop, works on each of its devices at least."""
        stage = leaf.stage
        loop = self.work.loop_of(stage)
        streams = bool(self.pricer.profile.stages[stage].finish_quantiles)
        layout = self.layout(leaf, 1 if streams or loop else chunks, shards=loop is not None)
        times = loop.chunk_steps * loop.expected_rounds if loop else 1.0
        if self.pricer.overlap_in_worker and loop:
            return dict.fromkeys(layout.hosts, 0.0)
        found: dict[int, float] = {}
        for size, device in zip(layout.sizes, layout.devices, strict=True):
            found[device] = found.get(device, 0.0) + times * self.seconds(stage, size, len(layout.hosts), device)
        return found

    def layout(self, leaf: Leaf, parts: int, shards: bool = False) -> Layout:
        """Returns the calls of a stage: for each of `parts` chunks, or shards of a loop."""
        key = (leaf, -parts if shards else parts)
        if key not in self._layouts:
            blocks, together = self.work.num_blocks, self.work.stages[leaf.stage].blocks_per_batch
            make = Layout.of_shards if shards else Layout.of_chunks
            self._layouts[key] = make(leaf, blocks, parts, together)
        return self._layouts[key]

    def parts(self, source: Layout, target: Layout, edge: tuple[str, str]) -> list[Parts]:
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
    def _leaf(self, step: Step, leaf: Leaf, exclusive: Exclusive, clocks: Clocks) -> None:
        stage, chunks, layout = leaf.stage, step.num_chunks, clocks.layouts[leaf.stage]
        if step.chunk == 0:
            self._enter([stage], layout.hosts, exclusive, clocks)
        waits = [
            (clocks.ends[source], self.parts(clocks.layouts[source], layout, (source, stage)))
            for source in self.work.sources(stage)
        ]
        calls = layout.groups[step.chunk]
        self.num_calls += len(calls)
        streams = chunks > 1 and bool(self.pricer.profile.stages[stage].finish_quantiles)
        begins = [max(clocks.free_s[layout.devices[c]], arrival([(e, p[c]) for e, p in waits])) for c in calls]
        if streams:
            lengths = [self._streamed_s(stage, layout, c, chunks) for c in calls]
        else:
            hosts = len(layout.hosts)
            lengths = [self.seconds(stage, layout.sizes[c], hosts, layout.devices[c]) for c in calls]
        if self.work.stages[stage].collective:
            begins, lengths = [max(begins)] * len(begins), [max(lengths)] * len(lengths)
        for call, begin, length in zip(calls, begins, lengths, strict=True):
            clocks.ends[stage][call] = clocks.work(stage, layout.devices[call], begin, length, step.chunk)

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

    def _loop(self, node: LoopNode, exclusive: Exclusive, clocks: Clocks) -> None:
        loop = self.work.loops[node.loop]
        opener = clocks.layouts[loop.opener]
        hosts = sorted({host for side in loop.sides for host in clocks.layouts[side].hosts})
        self._enter(loop.sides, hosts, exclusive, clocks)
        start_s = min(clocks.free_s[device] for device in hosts)
        self._open(loop, opener, clocks)
        if self._is_fused(node):
            self._fused(loop, opener, node.shards, clocks)
        else:
            _Stepwise(self, loop, clocks).run(hosts)
        if loop.expected_rounds != 1:
            self._repeat(loop, hosts, start_s, clocks)

    def _open(self, loop: Loop, opener: Layout, clocks: Clocks) -> None:
        """Shows what there is at the start, once what comes before the loop is there."""
        sources = [s for s in self.work.sources(loop.opener) if s not in loop.sides]
        waits = [(clocks.ends[s], self.parts(clocks.layouts[s], opener, (s, loop.opener))) for s in sources]
        for call, device in enumerate(opener.devices):
            begin = max(clocks.free_s[device], arrival([(e, p[call]) for e, p in waits]))
            clocks.free_s[device] = clocks.ends[loop.opener][call] = begin

    def _fused(self, loop: Loop, layout: Layout, shards: int, clocks: Clocks) -> None:
        """One call per worker."""
        fraction = self.pricer.profile.stages[loop.answerer].bootstrap_fraction
        overlaps, hosts = self.pricer.overlap_in_worker and shards > 1, len(layout.hosts)
        for call, device in enumerate(layout.devices):
            blocks = -(-layout.sizes[call] // shards) if overlaps else layout.sizes[call]
            e, p = (self.seconds(stage, blocks, hosts, device) for stage in (loop.opener, loop.answerer))
            steps = loop.chunk_steps
            if overlaps:
                whole = float(cost.loop_disaggregated_s(steps, shards, e, p, 0.0, 0.0, p * fraction))
                clocks.free_s[device] = end = clocks.free_s[device] + whole
                for stage, seconds in ((loop.opener, e), (loop.answerer, p)):
                    clocks.note(stage, device, end - seconds * steps * shards, end, 0)
            else:
                clocks.work(loop.answerer, device, clocks.free_s[device], p * (steps + fraction), 0)
                end = clocks.work(loop.opener, device, clocks.free_s[device], e * steps, 0)
            for side in loop.sides:
                clocks.ends[side][call] = end

    def _repeat(self, loop: Loop, hosts: Sequence[int], start_s: float, clocks: Clocks) -> None:
        """Stretches a round to the expected ones; the driver waits for a round before it submits the next one."""
        end_s = max(clocks.free_s[device] for device in hosts)
        more = (end_s - start_s) * (loop.expected_rounds - 1)
        for device in hosts:
            clocks.free_s[device] += more
        for stage in loop.sides:
            clocks.ends[stage] = [end + more for end in clocks.ends[stage]]
            for device in hosts:
                if (stage, device) in clocks.calls_s:
                    clocks.calls_s[stage, device] *= loop.expected_rounds

    # --------------------------------------------------------------------------------------------- switches, weights
    def _enter(self, stages: Sequence[str], hosts: Iterable[int], exclusive: Exclusive, clocks: Clocks) -> None:
        """Brings stages into memory after those that exclude them have left; see runtime/residents.py."""
        if not any(exclusive[stage] for stage in stages):
            return
        known = self.pricer.profile.stages
        for device in hosts:
            for stage in stages:
                if device not in clocks.layouts[stage].hosts:
                    continue
                for other in sorted(exclusive[stage]):
                    hosted = device in clocks.layouts[other].hosts
                    if hosted and (other, device) not in clocks.offloaded:
                        clocks.offloaded.add((other, device))
                        clocks.busy(device, clocks.free_s[device], known[other].offload_s)
                if (stage, device) in clocks.offloaded:
                    clocks.offloaded.discard((stage, device))
                    clocks.busy(device, clocks.free_s[device], known[stage].onload_s)

    def _weights(self, source: str, target: str, exclusive: Exclusive, clocks: Clocks) -> float:
        """Sends weights to who does not share a worker with their source, and returns when the last one has them."""
        sources, targets = clocks.layouts[source].hosts, clocks.layouts[target].hosts
        sharing = set() if self.pricer.cluster.always_store else set(sources)
        receivers = [device for device in targets if device not in sharing]
        measured = self.pricer.profile.weights.get((source, target))
        if not receivers:
            return 0.0
        sender = sources[0]
        self._enter([source], [sender], exclusive, clocks)
        sent = clocks.busy(sender, clocks.free_s[sender], measured.export_s if measured else 0.0)
        sent_s = sent
        for device in receivers:
            self._enter([target], [device], exclusive, clocks)
            wire = 0.0
            if measured and measured.bytes:
                wire = measured.bytes / self._rate(sender, device) + self.pricer.cluster.links.latency_s
            sent_s = max(sent_s, clocks.busy(device, sent + wire, measured.install_s if measured else 0.0))
        return sent_s


class _Stepwise:
    """A loop as a call per chunk-step, shard and worker."""

    def __init__(self, times: CallTimes, loop: Loop, clocks: Clocks) -> None:
        self._times, self._loop, self._clocks = times, loop, clocks
        self._layouts = {side: clocks.layouts[side] for side in loop.sides}
        self._lengths = {
            side: [times.seconds(side, n, len(own.hosts), d) for n, d in zip(own.sizes, own.devices, strict=True)]
            for side, own in self._layouts.items()
        }
        self._parts = {(a, b): times.parts(self._layouts[a], self._layouts[b], (a, b)) for a, b in loop.hops()}

    def run(self, hosts: Sequence[int]) -> None:
        """Goes through all steps; once each of them adds the same, the rest is added at once."""
        loop, clocks = self._loop, self._clocks
        ends = [clocks.ends[side] for side in loop.sides]
        last: list[float] = []
        step = 0
        while step < loop.chunk_steps:
            self._step(step)
            step += 1
            now = [*(clocks.free_s[d] for d in hosts), *clocks.ends[loop.opener]]
            added = [b - a for a, b in zip(last, now, strict=True)] if last else []
            left = loop.chunk_steps - step
            if added and left and max(added) - min(added) <= 1e-12 * max(now) and clocks.spans is None:
                clocks.skip(left, added[0], hosts, ends)
                for side, own in self._layouts.items():
                    for call, device in enumerate(own.devices):
                        clocks.calls_s[side, device] += left * self._lengths[side][call]
                step += left
                last = []
            else:
                last = now
        self._close()

    def _step(self, step: int) -> None:
        loop = self._loop
        for shard in range(len(self._layouts[loop.opener].groups)):
            self._exchange(loop.answerer, shard, [loop.opener], self._lengths[loop.answerer], step)
            self._exchange(loop.opener, shard, [loop.answerer], self._lengths[loop.opener], step)

    def _close(self) -> None:
        """All are shown what there is last, and the answerer values it."""
        loop, clocks = self._loop, self._clocks
        fraction = self._times.pricer.profile.stages[loop.answerer].bootstrap_fraction
        valued = [seconds * fraction for seconds in self._lengths[loop.answerer]]
        opener = self._layouts[loop.opener]
        for shard in range(len(opener.groups)):
            self._exchange(loop.answerer, shard, [loop.opener], valued, loop.chunk_steps)
            for call in opener.groups[shard]:
                clocks.ends[loop.opener][call] = clocks.free_s[opener.devices[call]]

    def _exchange(self, stage: str, shard: int, told: Sequence[str], lengths: Sequence[float], step: int) -> None:
        """One call of a side for a shard, on all workers that hold blocks of it; `told` by these."""
        clocks, layout = self._clocks, self._layouts[stage]
        self._times.num_calls += len(layout.groups[shard])
        waits = [(clocks.ends[other], self._parts[other, stage]) for other in told]
        for call in layout.groups[shard]:
            begin = arrival([(ends, parts[call]) for ends, parts in waits])
            clocks.ends[stage][call] = clocks.work(stage, layout.devices[call], begin, lengths[call], step)
