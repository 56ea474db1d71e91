"""What a simulation knows at a moment: clocks of devices, ends of calls, what is switched out; and what remains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlinf_embodied.planning.calls import Layout
from rlinf_embodied.telemetry.trace import Span

Parts = tuple[tuple[int, float, float], ...]  # what a call waits for: (call, seconds until it leaves, on the wire)


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came out of one iteration."""

    iteration_s: float
    busy_s: Mapping[int, float]  # by device: in calls, switches and weights
    stages_s: Mapping[str, float]  # by stage, on its busiest device: in calls
    other_s: Mapping[str, float]  # on the busiest device: in "switches" and "weights"
    driver_s: float  # in which the driver submitted calls
    calls: int = 0
    spans: tuple[Span, ...] = ()

    def idle_share(self, device: int) -> float:
        """Returns the share of the iteration in which a device does nothing."""
        return 1.0 - self.busy_s.get(device, 0.0) / self.iteration_s if self.iteration_s else 0.0


@dataclass(slots=True)
class Clocks:
    """Clocks by device; when each call of a stage ended, and who made which block; which stages are switched out."""

    free_s: list[float]
    layouts: Mapping[str, Layout]
    offloaded: set[tuple[str, int]]
    submit_s: float = 0.0  # of the driver, per call
    spans: list[Span] | None = None  # None: none are taken
    driver_s: float = 0.0  # when the driver has submitted all calls so far
    submitted: int = 0
    ends: dict[str, list[float]] = field(default_factory=dict)  # of the calls of an iteration
    calls_s: dict[tuple[str, int], float] = field(default_factory=dict)  # by stage and device: at work
    other_s: dict[tuple[str, int], float] = field(default_factory=dict)  # switches and weights, by device

    def begin(self, stages: Iterable[str]) -> None:
        """Makes room for the ends of some stages' calls."""
        self.ends |= {stage: [0.0] * len(self.layouts[stage].devices) for stage in stages}

    def last_s(self) -> float:
        """Returns when the last call of those in `ends` is over."""
        return max((end for ends in self.ends.values() for end in ends), default=0.0)

    def submit(self, calls: int = 1) -> float:
        """Counts calls that the driver submits, and returns when it has."""
        self.submitted += calls
        self.driver_s += calls * self.submit_s
        return self.driver_s

    def work(self, stage: str, device: int, begin_s: float, seconds: float, number: int) -> float:
        """Occupies a device with a call and returns its end."""
        start = max(begin_s, self.free_s[device])
        end = self.free_s[device] = start + seconds
        self.note(stage, device, start, end, number)
        return end

    def note(self, stage: str, device: int, start_s: float, end_s: float, number: int) -> None:
        """Counts a call of a stage."""
        self.calls_s[stage, device] = self.calls_s.get((stage, device), 0.0) + end_s - start_s
        if self.spans is not None:
            self.spans.append(Span(stage, stage, device, f"device {device}", start_s, end_s, {"call": number}))

    def busy(self, what: str, device: int, begin_s: float, seconds: float) -> float:
        """Occupies a device with something that is no call of a stage, and returns its end."""
        end = self.free_s[device] = max(begin_s, self.free_s[device]) + seconds
        self.other_s[what, device] = self.other_s.get((what, device), 0.0) + seconds
        return end

    def wait(self, until_s: float) -> None:
        """Lets nothing begin before a time: what is called from here on is submitted then."""
        self.driver_s = max(self.driver_s, until_s)
        self.free_s[:] = [max(free, until_s) for free in self.free_s]

    def simulation(self, iteration_s: float) -> Simulation:
        """Returns what was counted, as that of one iteration."""
        stages: dict[str, float] = {}
        busy: dict[int, float] = {}
        other: dict[str, float] = {}
        for (stage, device), seconds in self.calls_s.items():
            stages[stage] = max(stages.get(stage, 0.0), seconds)
            busy[device] = busy.get(device, 0.0) + seconds
        for (what, device), seconds in self.other_s.items():
            other[what] = max(other.get(what, 0.0), seconds)
            busy[device] = busy.get(device, 0.0) + seconds
        driver_s = self.submitted * self.submit_s
        return Simulation(iteration_s, busy, stages, other, driver_s, self.submitted, tuple(self.spans or ()))


def arrival(waits: Sequence[tuple[list[float], Parts]]) -> float:
    """Returns when everything that a call waits for is there: (ends of a source's calls, what it gets of them)."""
    here, sent = 0.0, []
    for ends, parts in waits:
        for call, delay, wire in parts:
            if wire:
                sent.append((ends[call] + delay, wire))
            elif ends[call] > here:
                here = ends[call]
    if not sent:
        return here
    sent.sort()
    arrived = 0.0
    for left, wire in sent:
        arrived = max(arrived, left) + wire
    return max(here, arrived)
