"""Simulates plans call by call: the price of plans, for the search, for reports and for predictions.

The simulation visits the calls of a plan's schedule in the order in which the executor submits them.  A worker
processes its calls in that order, so one pass suffices:

    start    a call starts once the driver has submitted it, its device has finished earlier calls, and its inputs have
             arrived
    arrival  each device sends and receives one block after the other; data within a worker arrives at once
    switch   before a call, stages that exclude the called one are offloaded, and it is onloaded
    loop     the same, chunk-step by chunk-step and shard by shard; one call per worker if both sides share workers
    weights  at the end, from one worker of the source to all workers of the target that do not host both

Time starts at 0, when the previous iteration has ended, with the stages offloaded that it left so.  For plans with a
staleness several iterations are simulated (ahead.py).

tests/tools/test_emulation.py compares this with the real executor, with stages that only sleep.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rlinf_embodied.planning.ahead import steady
from rlinf_embodied.planning.calls import Clocks, Layout, Parts, Simulation, arrival, links
from rlinf_embodied.planning.plan import Plan, Step, schedule
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import WeightProfile
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.workflow.graph import Loop, WeightEdge

_SPREAD = 1e-4  # clocks whose steps differ by less, as a fraction of a step, are taken to advance equally


class Simulator:
    """Simulates plans of one workflow, profile and cluster; times that many plans share are cached."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer, profile = pricer, pricer.profile
        stages = {
            name: replace(spec, at_once=spec.at_once or bool(profile.stages[name].finish_quantiles))
            for name, spec in pricer.workflow.stages.items()
        }
        self.work = replace(pricer.workflow, stages=stages)
        self._sources = {stage: self.work.sources(stage) for stage in stages}
        self._several = {stage for stage, spec in stages.items() if spec.devices_per_worker > 1}
        self._lengths: dict[Layout, list[float]] = {}
        self._streamed: dict[Layout, list[float]] = {}
        self._links: dict[tuple[Layout, Layout, str], list[Parts]] = {}

    def run(self, plan: Plan, traced: bool = False, limit_s: float = math.inf) -> Simulation:
        """Returns the simulation of one iteration of a plan; it takes inf seconds if a stage cannot run.

        A simulation may stop early once it exceeds `limit_s`: its seconds are then a lower bound above the limit.
        """
        runs_on = self.pricer.runs_on
        if not all(runs_on(p.stage, device) for item in plan.items for p in item.places for device in p.devices):
            return Simulation(math.inf, {}, {}, {}, 0.0)
        if plan.staleness:
            return steady(self, plan, traced)
        clocks = self.clocks(plan, self._switched_out(plan) if plan.exclusive else (), [] if traced else None)
        clocks.begin(clocks.layouts)
        for step in schedule(plan.items, self.work):
            self.submit(step, clocks)
            if max(clocks.free_s) > limit_s:
                return clocks.simulation(max(clocks.free_s))
        self.send_weights(clocks)
        return clocks.simulation(max(clocks.free_s))

    def _switched_out(self, plan: Plan) -> set[tuple[str, int]]:
        """Returns the (stage, device) pairs that are offloaded between iterations."""
        clocks = self.clocks(plan)
        for item in plan.items:
            hosts = sorted({host for stage in item.stages for host in clocks.layouts[stage].occupied})
            for stages in [item.stages] if self.work.loop_of(item.stages[0]) else [(stage,) for stage in item.stages]:
                self._enter(stages, hosts, clocks)
        self.send_weights(clocks)
        return clocks.offloaded

    # ----------------------------------------------------------------------------------------------------- submission
    def clocks(self, plan: Plan, offloaded: Iterable[tuple[str, int]] = (), spans: list[Span] | None = None) -> Clocks:
        """Returns clocks at 0, with the layout of each stage's calls."""
        layouts = {p.stage: calls for item in plan.items for p, calls in self.pricer.layouts.of_item(item)}
        exclusive = plan.excluded() if plan.exclusive else {}
        return Clocks([0.0] * plan.num_devices, layouts, set(offloaded), exclusive, self.pricer.submit_s, spans)

    def submit(self, step: Step, clocks: Clocks) -> None:
        """Simulates a step of an iteration; afterwards `clocks.ends` holds the ends of its calls."""
        several = self._several.intersection(step.stages)
        workers = [
            self.work.stages[stage].devices_of(host) for stage in several for host in clocks.layouts[stage].hosts
        ]
        for stage in several:
            self._enter([stage], clocks.layouts[stage].occupied, clocks)
        for devices in workers:  # a worker waits for the devices lent to it, ...
            clocks.submit(1 + len(devices))
            clocks.free_s[devices[0]] = max(clocks.free_s[device] for device in devices)
        self._calls(step, clocks)
        for devices in workers:  # ... which wait for the end of its call
            clocks.submit(len(devices))
            for device in devices[1:]:
                clocks.free_s[device] = max(clocks.free_s[device], clocks.free_s[devices[0]])

    def _calls(self, step: Step, clocks: Clocks) -> None:
        loop = self.work.loop_of(step.stages[0])
        if loop is None:
            return self._leaf(step, clocks)
        opener, answerer = (clocks.layouts[side] for side in loop.sides)
        hosts = sorted({*opener.hosts, *answerer.hosts})
        self._enter(loop.sides, hosts, clocks)
        self._open(loop, opener, clocks)
        if (opener.devices, opener.call_of) == (answerer.devices, answerer.call_of):
            return self._fused(loop, opener, clocks)
        return _Stepwise(self, loop, clocks).run(hosts)

    def send_weights(self, clocks: Clocks) -> float:
        """Simulates the weight edges; returns the time at which all weights are installed, 0 if none are sent."""
        return max((self._weights(edge, clocks) for edge in self.work.weight_edges), default=0.0)

    # ------------------------------------------------------------------------------------------------ facts of calls
    def lengths(self, stage: str, layout: Layout) -> list[float]:
        known = self._lengths.get(layout)
        if known is None:
            seconds, hosts = self.pricer.seconds, len(layout.hosts)
            known = [seconds(stage, n, hosts, d) for n, d in zip(layout.sizes, layout.devices, strict=True)]
            self._lengths[layout] = known
        return known

    def streamed(self, stage: str, layout: Layout) -> list[float]:
        """Returns the seconds of each call of a stage in chunks.

        A stage with long tails begins all blocks of a device at once; each call lasts until its blocks are finished.
        """
        measured = self.pricer.profile.stages[stage]
        if not measured.finish_quantiles:
            return self.lengths(stage, layout)
        if layout not in self._streamed:
            owned, done = dict.fromkeys(layout.hosts, 0), dict.fromkeys(layout.hosts, 0)
            for size, device in zip(layout.sizes, layout.devices, strict=True):
                owned[device] += size
            lengths = []
            for size, device in zip(layout.sizes, layout.devices, strict=True):
                share = measured.finish_share(done[device] / owned[device], (done[device] + size) / owned[device])
                lengths.append(self.pricer.seconds(stage, owned[device], len(layout.hosts), device) * share)
                done[device] += size
            self._streamed[layout] = lengths
        return self._streamed[layout]

    def _parts(self, source: Layout, target: Layout, ends: tuple[str, str]) -> list[Parts]:
        """Returns the inputs of each call of a target from a source's calls."""
        key = (source, target, ends[0])
        if key not in self._links:
            size = self.pricer.edge_bytes(*ends) * self.work.items_per_block
            latency_s = self.pricer.cluster.links.latency_s
            self._links[key] = []
            for device, inputs in zip(target.devices, links(source, target), strict=True):
                parts = []
                for call, (blocks, place) in inputs.items():
                    sender = source.devices[call]
                    wire = 0.0 if sender == device or not size else size / self.pricer.rate(sender, device)
                    parts.append((call, place * wire + latency_s, blocks * wire) if wire else (call, 0.0, 0.0))
                self._links[key].append(tuple(parts))
        return self._links[key]

    # -------------------------------------------------------------------------------------------------------- leaves
    def _leaf(self, step: Step, clocks: Clocks) -> None:
        (stage,), layout = step.stages, clocks.layouts[step.stages[0]]
        if step.chunk == 0:
            self._enter([stage], layout.hosts, clocks)
        waits = [
            (clocks.ends[source], self._parts(clocks.layouts[source], layout, (source, stage)))
            for source in self._sources[stage]
        ]
        calls, devices, free = layout.groups[step.chunk], layout.devices, clocks.free_s
        begins = [
            max(free[devices[c]], clocks.submit(), arrival([(e, p[c]) for e, p in waits]) if waits else 0.0)
            for c in calls
        ]
        of_calls = self.streamed(stage, layout) if step.num_chunks > 1 else self.lengths(stage, layout)
        lengths = [of_calls[c] for c in calls]
        if self.work.stages[stage].collective:
            begins, lengths = [max(begins)] * len(begins), [max(lengths)] * len(lengths)
        ends = clocks.ends[stage]
        for call, begin, length in zip(calls, begins, lengths, strict=True):
            ends[call] = clocks.work(stage, devices[call], begin, length, step.chunk)

    # --------------------------------------------------------------------------------------------------------- loops
    def _open(self, loop: Loop, opener: Layout, clocks: Clocks) -> None:
        sources = [s for s in self._sources[loop.opener] if s not in loop.sides]
        waits = [(clocks.ends[s], self._parts(clocks.layouts[s], opener, (s, loop.opener))) for s in sources]
        for call, device in enumerate(opener.devices):
            begin = max(clocks.free_s[device], clocks.submit(), arrival([(e, p[call]) for e, p in waits]))
            clocks.free_s[device] = clocks.ends[loop.opener][call] = begin

    def _fused(self, loop: Loop, layout: Layout, clocks: Clocks) -> None:
        fraction, steps = self.pricer.profile.stages[loop.answerer].bootstrap_fraction, loop.chunk_steps
        for call, (device, blocks) in enumerate(zip(layout.devices, layout.sizes, strict=True)):
            e, p = (self.pricer.seconds(stage, blocks, len(layout.hosts), device) for stage in loop.sides)
            clocks.work(loop.answerer, device, clocks.free_s[device], p * (steps + fraction), 0)
            end = clocks.work(loop.opener, device, clocks.free_s[device], e * steps, 0)
            for side in loop.sides:
                clocks.ends[side][call] = end

    # --------------------------------------------------------------------------------------------- switches, weights
    def _enter(self, stages: Sequence[str], hosts: Iterable[int], clocks: Clocks) -> None:
        """Onloads stages after offloading those that exclude them; see runtime/host.py."""
        known, exclusive = self.pricer.profile.stages, clocks.exclusive
        if not any(exclusive.get(stage) for stage in stages):
            return
        for device in hosts:
            for stage in stages:
                if device not in clocks.layouts[stage].occupied:
                    continue
                for other in sorted(exclusive[stage]):
                    hosted = device in clocks.layouts[other].occupied
                    if hosted and (other, device) not in clocks.offloaded:
                        clocks.offloaded.add((other, device))
                        clocks.busy("switches", device, clocks.free_s[device], known[other].offload_s)
                if (stage, device) in clocks.offloaded:
                    clocks.offloaded.discard((stage, device))
                    clocks.busy("switches", device, clocks.free_s[device], known[stage].onload_s)

    def _weights(self, edge: WeightEdge, clocks: Clocks) -> float:
        """Simulates sending weights to workers without their source; returns the time of the last installation."""
        source, target = edge.source, edge.target
        sender, *others = clocks.layouts[source].hosts
        sharing = () if edge.changes else (sender, *others)
        receivers = [device for device in clocks.layouts[target].hosts if device not in sharing]
        measured = self.pricer.profile.weights.get((source, target), WeightProfile(0.0))
        if not receivers:
            return 0.0
        self._enter([source], [sender], clocks)
        begin = max(clocks.free_s[sender], clocks.submit())
        sent_s = sent = clocks.busy("weights", sender, begin, measured.export_s)
        for device in receivers:
            self._enter([target], [device], clocks)
            wire, begin = 0.0, clocks.submit()
            if measured.bytes:
                wire = measured.bytes / self.pricer.rate(sender, device) + self.pricer.cluster.links.latency_s
            installed = clocks.busy("weights", device, max(begin, sent + wire), measured.install_s)
            sent_s = max(sent_s, installed)
        return sent_s


class _Stepwise:
    """Simulates a loop as one call per chunk-step, shard and worker."""

    def __init__(self, simulator: Simulator, loop: Loop, clocks: Clocks) -> None:
        self._loop, self._clocks, self._pricer = loop, clocks, simulator.pricer
        self._layouts = {side: clocks.layouts[side] for side in loop.sides}
        self._lengths = {side: simulator.lengths(side, layout) for side, layout in self._layouts.items()}
        ends = ((loop.opener, loop.answerer), (loop.answerer, loop.opener))
        self._parts = {b: simulator._parts(self._layouts[a], self._layouts[b], (a, b)) for a, b in ends}
        opener, answerer = (self._layouts[side] for side in loop.sides)
        calls = zip(opener.call_of, answerer.call_of, strict=True)
        answers = {(opener.devices[a], answerer.devices[b]) for a, b in calls}
        # whether each of the answerer's workers relays to its openers, so that the driver calls it only once
        self._relays = len(answers) == len(opener.hosts) and not set(opener.hosts) & set(answerer.hosts)

    def run(self, hosts: Sequence[int]) -> None:
        """Simulates the steps; once two in a row add the same to every clock, the remaining ones are added at once.

        This requires that all clocks advance equally: a faster one would overtake another one at some time.
        """
        loop, clocks = self._loop, self._clocks
        if self._relays:
            clocks.submit(len(self._layouts[loop.answerer].hosts))
        last: list[float] = []
        before = self._times(hosts)
        for step in range(loop.chunk_steps):
            submitted, driver_s = clocks.submitted, clocks.driver_s
            for shard in range(len(self._layouts[loop.opener].groups)):
                for me, other in (loop.sides[::-1], loop.sides):
                    self._exchange(me, other, shard, self._lengths[me], step)
            now = self._times(hosts)
            added = [b - a for a, b in zip(before, now, strict=True)]
            remaining, per_step, same = loop.chunk_steps - step - 1, clocks.driver_s - driver_s, 1e-12 * max(now)
            repeats = bool(last) and all(abs(a - b) <= same for a, b in zip(last, added, strict=True))
            in_step = max(added) - min(added) <= _SPREAD * min(added) and per_step <= min(added)
            if remaining and repeats and in_step and clocks.spans is None:
                self._skip(remaining, hosts, added)
                clocks.submitted += remaining * (clocks.submitted - submitted)
                clocks.driver_s += remaining * per_step
                break
            last, before = added, now
        self._close()

    def _times(self, hosts: Sequence[int]) -> list[float]:
        ends = (self._clocks.ends[side] for side in self._loop.sides)
        return [*(self._clocks.free_s[device] for device in hosts), *itertools.chain.from_iterable(ends)]

    def _skip(self, steps: int, hosts: Sequence[int], added: Sequence[float]) -> None:
        clocks, seconds = self._clocks, iter(added)
        for device in hosts:
            clocks.free_s[device] += steps * next(seconds)
        for side, layout in self._layouts.items():
            ends = clocks.ends[side]
            for call, device in enumerate(layout.devices):
                ends[call] += steps * next(seconds)
                clocks.calls_s[side, device] += steps * self._lengths[side][call]

    def _close(self) -> None:
        """Simulates the last call of the answerer, which values the final observations, and the opener's close."""
        loop, clocks = self._loop, self._clocks
        fraction = self._pricer.profile.stages[loop.answerer].bootstrap_fraction
        valued = [seconds * fraction for seconds in self._lengths[loop.answerer]]
        opener = self._layouts[loop.opener]
        self._relays = False
        for shard in range(len(opener.groups)):
            self._exchange(loop.answerer, loop.opener, shard, valued, loop.chunk_steps)
            for call in opener.groups[shard]:
                clocks.submit()
                clocks.ends[loop.opener][call] = clocks.free_s[opener.devices[call]]

    def _exchange(self, stage: str, other: str, shard: int, lengths: Sequence[float], step: int) -> None:
        """Simulates the calls of one side for a shard, with messages of the other side as inputs."""
        clocks, layout = self._clocks, self._layouts[stage]
        inputs, parts, ends = clocks.ends[other], self._parts[stage], clocks.ends[stage]
        for call in layout.groups[shard]:
            needs, device = parts[call], layout.devices[call]
            if len(needs) == 1:  # by far the most
                ((source, delay, wire),) = needs
                begin = inputs[source] + delay + wire
            else:
                begin = arrival([(inputs, needs)])
            if not self._relays:
                begin = max(begin, clocks.submit())
            ends[call] = clocks.work(stage, device, begin, lengths[call], step)


def simulate(plan: Plan, pricer: Pricer, traced: bool = False) -> Simulation:
    """Returns the simulation of one iteration of a plan, with a span for every call if `traced`."""
    return Simulator(pricer).run(plan, traced)
