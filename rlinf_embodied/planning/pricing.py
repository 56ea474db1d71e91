"""Seconds, bytes and memory of single calls, by stage, blocks and device: the inputs of a simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.planning.calls import Layouts
from rlinf_embodied.planning.plan import Item, Plan, excluded_by, whole, with_lent
from rlinf_embodied.planning.profile import Profile
from rlinf_embodied.workflow.graph import Workflow

Facts = tuple[float, float, float]  # bytes of a stage on a device: resident, of its largest call, offloaded
Entries = tuple[tuple[str, Facts], ...]  # the stages of an item on a device
Held = tuple[Entries, ...]  # those of each item that uses a device, in the order of items


@dataclass(frozen=True, slots=True)
class Standing:
    """A copy of a stage that stays in memory while a plan runs, on all devices or one per block."""

    stage: str
    num_blocks: int
    items_per_block: int


class Pricer:
    """Prices single calls of a workflow on a cluster: seconds and memory, from a profile."""

    def __init__(
        self,
        workflow: Workflow,
        profile: Profile,
        cluster: Cluster,
        *,
        standing: Sequence[Standing] = (),
        scale: float = 1.0,
        devices_per_worker: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Checks that the profile covers the workflow.

        `standing` are the copies of stages that evaluations keep on the computing devices; `scale` is the number of
        real devices that each device of the cluster represents, and `devices_per_worker`, by stage, that of real
        devices of a worker.

        Raises:
            ConfigError: the profile lacks a stage.
        """
        inside = [side for loop in workflow.loops.values() for side in loop.sides]
        profile.require(workflow.stages, inside)
        self.workflow, self.profile, self.cluster = workflow, profile, cluster
        self.standing, self.scale, self.devices_per_worker = standing, scale, devices_per_worker
        self.groups = cluster.node_groups()
        self.group_of = [n for n, devices in enumerate(cluster.group_devices()) for _ in devices]
        self.node_of = [cluster.place_of(device).node for device in range(cluster.num_devices)]
        self.memory_bytes = [self.groups[n].memory_bytes - self._standing_bytes(d) for d, n in enumerate(self.group_of)]
        self.rounds = workflow.expected_rounds()
        self.submit_s = cluster.links.submit_s * scale
        self.layouts = Layouts(workflow)
        self._slowdown = dict[tuple[str, int], float]()
        for stage, spec in workflow.stages.items():
            measured = profile.stages[stage]
            factors = {profile.device_kind: 1.0, **measured.kind_factors}
            for n, group in enumerate(self.groups):
                fits = measured.cores_per_device <= group.cores_per_device and group.kind in (spec.kinds or factors)
                self._slowdown[stage, n] = factors.get(group.kind, math.inf) / group.speed if fits else math.inf
        self._usable = {stage: self._usable_by(stage) for stage in workflow.stages}
        self._seconds: dict[tuple[str, int, int, int], float] = {}
        self._facts: dict[tuple[str, int, int, int], Facts] = {}
        ends, known = [(e.source, e.target) for e in workflow.weight_edges if not e.changes], profile.stages
        shared = {(a, b): known[b].shared_bytes or known[a].shared_bytes for a, b in ends}
        self._shared = {pair: size for pair, size in shared.items() if size}
        self._items: dict[Item, dict[int, Entries]] = {}
        self._peaks: dict[tuple[Held, frozenset[tuple[str, str]]], float] = {}

    def with_(self, **changes: object) -> Pricer:
        names = ("workflow", "profile", "cluster", "standing", "scale", "devices_per_worker")
        return Pricer(**({name: getattr(self, name) for name in names} | changes))  # pyright: ignore[reportArgumentType]

    # ------------------------------------------------------------------------------------------------------------ time
    def slowdown_on(self, stage: str, device: int) -> float:
        """Returns how much longer a stage takes on a device than the profile says; inf where it cannot run."""
        return self._slowdown[stage, self.group_of[device]]

    def runs_on(self, stage: str, device: int) -> bool:
        """Returns whether a device can run a stage, with the other devices of a worker if those are several."""
        return device in self._usable[stage]

    def _usable_by(self, stage: str) -> frozenset[int]:
        each, nodes = self.workflow.stages[stage].devices_per_worker, self.node_of
        runs = {device for device in range(len(nodes)) if self.slowdown_on(stage, device) < math.inf}
        return frozenset(with_lent((w for w in whole(runs, each) if nodes[w] == nodes[w + each - 1]), each))

    def seconds(self, stage: str, blocks: int, num_devices: int, device: int) -> float:
        """Returns the seconds of a call (or chunk-step) for this number of blocks on one of `num_devices` devices."""
        key = (stage, blocks, num_devices, self.group_of[device])
        if key not in self._seconds:
            slowdown = self._slowdown[stage, key[3]]
            if slowdown < math.inf:  # inf times 0 s would be NaN
                slowdown *= self.profile.stages[stage].call_s(*self._cell(stage, blocks, num_devices))
            self._seconds[key] = slowdown * self.rounds.get(stage, 1.0)
        return self._seconds[key]

    def _cell(self, stage: str, blocks: int, num_devices: int) -> tuple[int, float]:
        """Returns the items of a worker, and the number of workers, if a stage has blocks on each of `num_devices`."""
        each = self.devices_per_worker.get(stage, 1)
        return blocks * self.workflow.items_per_block * each, num_devices * self.scale / each

    def rate(self, a: int, b: int) -> float:
        """Returns the bytes per second from a device to another one."""
        links = self.cluster.links
        return links.within_node_bytes_per_s if self.node_of[a] == self.node_of[b] else links.across_nodes_bytes_per_s

    def edge_bytes(self, source: str, target: str) -> float:
        """Returns the bytes per item that `target` gets from all rounds of `source`, 0 if they are not known."""
        return self.profile.edge_bytes_per_item.get((source, target), 0.0) * self.rounds.get(source, 1.0)

    # ---------------------------------------------------------------------------------------------------------- memory
    def _standing_bytes(self, device: int) -> float:
        held = 0.0
        for copy in self.standing:
            number = min(self.cluster.num_computing * self.scale, copy.num_blocks)
            if device * self.scale < number:
                items = math.ceil(copy.num_blocks / number) * copy.items_per_block
                held += self.profile.stages[copy.stage].resident(items, number)
        return held

    def memory(self, plan: Plan) -> dict[int, float]:
        """Returns the peak bytes of each device of a plan during an iteration.

        Data of fronts that run ahead counts on the device that produced it, if the bytes of its edges are known.
        """
        pairs = frozenset(plan.exclusive)
        peaks = {device: self.peak(held, pairs) for device, held in self.held(plan.items).items()}
        for device, num_bytes in self.ahead_bytes(plan).items():
            peaks[device] += num_bytes
        return peaks

    def fits(self, plan: Plan) -> bool:
        return all(num_bytes <= self.memory_bytes[device] for device, num_bytes in self.memory(plan).items())

    def held(self, items: Sequence[Item]) -> dict[int, Held]:
        on: dict[int, list[Entries]] = {}
        for item in items:
            for device, entries in self._entries_of(item).items():
                on.setdefault(device, []).append(entries)
        return {device: tuple(entries) for device, entries in on.items()}

    def _entries_of(self, item: Item) -> dict[int, Entries]:
        if item not in self._items:
            entries: dict[int, list[tuple[str, Facts]]] = {}
            for place, layout in self.layouts.of_item(item):
                owned, largest = dict.fromkeys(layout.hosts, 0), dict.fromkeys(layout.hosts, 0)
                for device, size in zip(layout.devices, layout.sizes, strict=True):
                    owned[device] += size
                    largest[device] = max(largest[device], size)
                at_once = owned if self.profile.stages[place.stage].finish_quantiles else largest
                for worker in layout.hosts:
                    facts = self._bytes(place.stage, len(layout.hosts), owned[worker], at_once[worker])
                    for device in self.workflow.stages[place.stage].devices_of(worker):
                        entries.setdefault(device, []).append((place.stage, facts))
            self._items[item] = {device: tuple(of_device) for device, of_device in entries.items()}
        return self._items[item]

    def _bytes(self, stage: str, devices: int, owned: int, called: int) -> Facts:
        key = (stage, devices, owned, called)
        if key not in self._facts:
            measured = self.profile.stages[stage]
            held = measured.resident(*self._cell(stage, owned, devices))
            working = measured.working(*self._cell(stage, called, devices))
            self._facts[key] = held, working, measured.offloaded_bytes
        return self._facts[key]

    def peak(self, held: Held, pairs: frozenset[tuple[str, str]]) -> float:
        """Returns the peak bytes of a device on which items hold these entries, with these exclusive pairs."""
        if (held, pairs) not in self._peaks:
            self._peaks[held, pairs] = _peak(held, excluded_by(pairs, self.workflow.stages), self._shared)
        return self._peaks[held, pairs]

    def ahead_bytes(self, plan: Plan) -> dict[int, float]:
        """Returns the bytes on each device of data that the front of a plan with a staleness has produced ahead.

        Data of a stage with several consumers exists once, so only its largest edge counts.
        """
        work, back, by_device = self.workflow, self.workflow.back() if plan.staleness else (), dict[int, float]()
        for stage in work.stages if plan.staleness else ():
            sizes = [self.edge_bytes(e.source, e.target) for e in work.edges if e.source == stage and e.target in back]
            if stage in back or not any(sizes):
                continue
            for device in plan.owners(stage, work):
                by_device[device] = by_device.get(device, 0.0) + plan.staleness * max(sizes) * work.items_per_block
        return by_device


def _peak(
    items: Sequence[Entries], excluded: Mapping[str, frozenset[str]], shared: Mapping[tuple[str, str], float]
) -> float:
    """Returns the peak bytes of a device over all calls: of loaded and offloaded stages, and of the call itself.

    Weights that both ends of a weight edge share count once while both are loaded.
    """
    facts = {stage: of_stage for entries in items for stage, of_stage in entries}
    once = {ends: size for ends, size in shared.items() if facts.keys() >= set(ends)}
    if not any(not excluded[stage].isdisjoint(facts) for stage in facts if stage in excluded):
        held = sum(held for held, _, _ in facts.values()) - sum(once.values())
        return held + max(working for _, working, _ in facts.values())
    loaded: set[str] = set()
    peak = 0.0
    for _ in range(2):  # the second pass starts with the stages that an iteration leaves in memory
        peak = 0.0
        for entries in items:
            for stage, _ in entries:
                loaded = (loaded - excluded[stage]) | {stage}
            now = sum(held if stage in loaded else off for stage, (held, _, off) in facts.items())
            now -= sum(size for ends, size in once.items() if loaded.issuperset(ends))
            peak = max(peak, now + max(working for _, (_, working, _) in entries))
    return peak
