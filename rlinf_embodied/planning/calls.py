"""Calls of stages: their blocks, the data flow between them, and the clocks of a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlinf_embodied.planning.plan import Item, Place, fused, leading, owners, with_lent
from rlinf_embodied.telemetry.trace import Span
from rlinf_embodied.workflow.graph import Workflow

Parts = tuple[tuple[int, float, float], ...]  # inputs of a call: (source's call, delay before sending, transfer), in s


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The calls of a stage and the blocks of each.

    Two devices, four blocks, two chunks: devices (0, 1, 0, 1), sizes (1, 1, 1, 1), groups (0..1, 2..3).
    """

    devices: tuple[int, ...]  # by call
    sizes: tuple[int, ...]  # by call: its number of blocks
    groups: tuple[range, ...]  # the calls of each chunk or shard
    call_of: tuple[int, ...]  # by block: the call that processes it
    place_of: tuple[int, ...]  # by block: its position among the blocks of that call
    hosts: tuple[int, ...]  # devices with any block, ascending
    occupied: tuple[int, ...]  # the same and those lent to them


class Layouts:
    """The layouts of one workflow's stages, cached, since many plans share them."""

    def __init__(self, workflow: Workflow) -> None:
        self._workflow = workflow
        self._known: dict[tuple[Place, int], Layout] = {}

    def of(self, place: Place, parts: int, shards: bool = False) -> Layout:
        """Returns the calls of a stage: for each of `parts` chunks, or shards of a loop."""
        key = (place, -parts if shards else parts)
        if key not in self._known:
            blocks, spec = self._workflow.num_blocks, self._workflow.stages[place.stage]
            size = blocks if shards else blocks // parts
            cut = [range(k, blocks, parts) if shards else range(k * size, (k + 1) * size) for k in range(parts)]
            owner = owners(leading(place, self._workflow), blocks, size, spec.blocks_per_batch)
            self._known[key] = _layout(cut, owner, spec.devices_per_worker)
        return self._known[key]

    def of_item(self, item: Item) -> list[tuple[Place, Layout]]:
        loop = self._workflow.loop_of(item.places[0].stage)
        places = tuple(leading(place, self._workflow) for place in item.places)
        parts = item.chunks if loop is None else 1 if fused(places, self._workflow.num_blocks) else item.shards
        return [(place, self.of(place, parts, shards=loop is not None)) for place in item.places]


def _layout(parts: list[range], owner: tuple[int, ...], devices_per_worker: int) -> Layout:
    devices: list[int] = []
    sizes: list[int] = []
    groups: list[range] = []
    call_of, place_of = [0] * len(owner), [0] * len(owner)
    for part in parts:
        first, last = len(devices), None
        for block in part:
            if owner[block] != last:
                last = owner[block]
                devices.append(last)
                sizes.append(0)
            call_of[block], place_of[block] = len(devices) - 1, sizes[-1]
            sizes[-1] += 1
        groups.append(range(first, len(devices)))
    hosts = tuple(sorted(set(owner)))
    occupied = with_lent(hosts, devices_per_worker)
    return Layout(tuple(devices), tuple(sizes), tuple(groups), tuple(call_of), tuple(place_of), hosts, occupied)


def links(source: Layout, target: Layout) -> list[dict[int, tuple[int, int]]]:
    """Returns for each call of a target the blocks that it gets, by the source's call that produces them.

    An entry is (number of blocks, position of the first of them among the blocks of the source's call).
    """
    inputs: list[dict[int, tuple[int, int]]] = [{} for _ in target.devices]
    for block, call in enumerate(target.call_of):
        producer, place = source.call_of[block], source.place_of[block]
        blocks, first = inputs[call].get(producer, (0, place))
        inputs[call][producer] = blocks + 1, min(first, place)
    return inputs


@dataclass(frozen=True, slots=True)
class Simulation:
    """The simulated times of one iteration."""

    iteration_s: float
    busy_s: Mapping[int, float]  # by device: in calls, switches and weights
    stages_s: Mapping[str, float]  # by stage, on its busiest device: in calls
    other_s: Mapping[str, float]  # on the busiest device: in "switches" and "weights"
    driver_s: float  # the driver's time for submitting calls
    calls: int = 0
    spans: tuple[Span, ...] = ()

    def idle_share(self, device: int) -> float:
        return 1.0 - self.busy_s.get(device, 0.0) / self.iteration_s if self.iteration_s else 0.0


@dataclass(slots=True)
class Clocks:
    """The state of a simulation: clocks of devices and of the driver, ends of calls, offloaded stages."""

    free_s: list[float]
    layouts: Mapping[str, Layout]
    offloaded: set[tuple[str, int]]
    exclusive: Mapping[str, frozenset[str]]  # by stage: those that may not be in memory together with it
    submit_s: float = 0.0  # of the driver, per call
    spans: list[Span] | None = None  # None: none are recorded
    driver_s: float = 0.0  # when the driver has submitted all calls so far
    submitted: int = 0
    ends: dict[str, list[float]] = field(default_factory=dict)  # of the calls of an iteration
    calls_s: dict[tuple[str, int], float] = field(default_factory=dict)  # by stage and device: at work
    other_s: dict[tuple[str, int], float] = field(default_factory=dict)  # switches and weights, by device

    def begin(self, stages: Iterable[str]) -> None:
        self.ends |= {stage: [0.0] * len(self.layouts[stage].devices) for stage in stages}

    def last_s(self) -> float:
        return max((end for ends in self.ends.values() for end in ends), default=0.0)

    def submit(self, calls: int = 1) -> float:
        """Counts calls that the driver submits, and returns the time at which it has submitted them."""
        self.submitted += calls
        self.driver_s += calls * self.submit_s
        return self.driver_s

    def work(self, stage: str, device: int, begin_s: float, seconds: float, number: int) -> float:
        start = max(begin_s, self.free_s[device])
        end = self.free_s[device] = start + seconds
        self.calls_s[stage, device] = self.calls_s.get((stage, device), 0.0) + seconds
        if self.spans is not None:
            self.spans.append(Span(stage, stage, device, f"device {device}", start, end, {"call": number}))
        return end

    def busy(self, what: str, device: int, begin_s: float, seconds: float) -> float:
        """Occupies a device with work that is not a call of a stage ("switches", "weights"), and returns its end."""
        end = self.free_s[device] = max(begin_s, self.free_s[device]) + seconds
        self.other_s[what, device] = self.other_s.get((what, device), 0.0) + seconds
        return end

    def wait(self, until_s: float) -> None:
        """Advances all clocks to a time, so that no later call begins before it."""
        self.driver_s = max(self.driver_s, until_s)
        self.free_s[:] = [max(free, until_s) for free in self.free_s]

    def simulation(self, iteration_s: float) -> Simulation:
        stages, busy, other = dict[str, float](), dict[int, float](), dict[str, float]()
        for largest, table in ((stages, self.calls_s), (other, self.other_s)):
            for (name, device), seconds in table.items():
                largest[name] = max(largest.get(name, 0.0), seconds)
                layout = self.layouts.get(name)
                each = len(layout.occupied) // len(layout.hosts) if layout else 1
                for occupied in range(device, device + each):
                    busy[occupied] = busy.get(occupied, 0.0) + seconds
        driver_s = self.submitted * self.submit_s
        return Simulation(iteration_s, busy, stages, other, driver_s, self.submitted, tuple(self.spans or ()))


def arrival(waits: Sequence[tuple[list[float], Parts]]) -> float:
    """Returns the time at which all inputs of a call have arrived; `waits` has (ends of a source's calls, parts)."""
    local, sent = 0.0, []
    for ends, parts in waits:
        for call, delay, wire in parts:
            if wire:
                sent.append((ends[call] + delay, wire))
            elif ends[call] > local:
                local = ends[call]
    if not sent:
        return local
    sent.sort()
    arrived = 0.0
    for departure, wire in sent:
        arrived = max(arrived, departure) + wire
    return max(local, arrived)
