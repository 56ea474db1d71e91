"""The stages of emulated workers: they sleep instead of computing, on a device with a clock and a memory.

    Parcel      represents a block's data: its device, and when it was ready, in emulated seconds
    arrival     ready_s plus the transfer from another device; sender and receiver handle one parcel at a time
    call        begins when the device is free and all inputs have arrived, takes the seconds of the profile, and
                returns when the wall clock reaches its end: start + end_s * scale

Executor, workers, messages, waiting and locks are the real ones; only the work is replaced.  Each call sleeps until a
deadline computed from the deadlines of its inputs, not for a duration from when it actually started.  So the overhead
of a hop (a millisecond, which a time scale of 0.02 would turn into 50) does not add up along a chain of calls as long
as the machine keeps up.  If it does not, calls end late on the wall clock, and the result reports by how much.  A wrong
order of submission or a missed overlap is still visible: a worker runs its calls one after the other.

This module does not import torch: a sleeping worker needs no core and little memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.planning.profile import StageProfile, WeightProfile
from rlinf_embodied.runtime.host import Output, Receipt, StageContext, StepContext
from rlinf_embodied.telemetry.trace import Span

NO_WEIGHTS = WeightProfile(0.0)


@dataclass(frozen=True, slots=True)
class Start:
    """The message of every step: the iteration, when it began, and wall seconds per emulated second."""

    iteration: int
    wall_s: float  # on the wall clock
    scale: float
    begin_s: float = 0.0  # emulated seconds: no call of the iteration begins earlier


@dataclass(frozen=True, slots=True)
class Parcel:
    """Represents a block's data, or weights."""

    stage: str  # that produced it
    device: int
    ready_s: float  # emulated seconds
    place: int = 0  # position among the blocks of its call, which are sent one after the other


@dataclass(frozen=True, slots=True)
class Finish:
    """A stage's report: when its call ended, and the peak memory of its device since the run began."""

    end_s: float
    peak_bytes: float
    start: Start
    spans: tuple[Span, ...] = ()  # of its device's calls in this iteration so far, in emulated seconds


@dataclass(frozen=True, slots=True)
class EmulatedStageConfig:
    """The stage's profile, and its cluster."""

    run: str  # stages of one run share their device's clock and memory
    profile: StageProfile
    items_per_block: int
    cluster: Cluster
    slowdown: tuple[float, ...]  # of this stage on each device
    answers: bool = False  # whether it is the answering side of a loop
    bytes_per_block: Mapping[str, float] = field(default_factory=dict)  # from each source
    exports: WeightProfile = NO_WEIGHTS
    installs: WeightProfile = NO_WEIGHTS


class EmulatedDevice:
    """The clock and the memory of one device; the stages of its worker share it."""

    def __init__(self, number: int, memory_bytes: float) -> None:
        self.number, self.memory_bytes = number, memory_bytes
        self.start = Start(-1, 0.0, 0.0)
        self.held: dict[str, float] = {}  # resident bytes of each stage, loaded or offloaded
        self.free_s = 0.0  # end of the last call
        self.peak_bytes = 0.0
        self.spans: list[Span] = []  # of this iteration's calls

    def work(self, begin_s: float, seconds: float) -> float:
        self.free_s = max(begin_s, self.free_s) + seconds
        deadline = self.start.wall_s + (self.free_s - self.start.begin_s) * self.start.scale
        time.sleep(max(0.0, deadline - time.time()))
        return self.free_s


class EmulatedStage:
    """Any stage of a workflow on an emulated device: a leaf, either side of a loop, source or target of weights."""

    def __init__(self, config: EmulatedStageConfig) -> None:
        self._config, self._profile = config, config.profile

    def setup(self, context: StageContext) -> str:
        """Returns the device's name."""
        memory = self._config.cluster.place_of(context.worker).group.memory_bytes
        key = f"emulated device of {self._config.run}"
        device = context.share(key, lambda: EmulatedDevice(context.worker, memory))
        assert isinstance(device, EmulatedDevice)
        self._device, self._group, self._blocks = device, context.group, context.blocks
        self._num_devices = len(set(context.owners))
        self._owned = len(context.blocks) * self._config.items_per_block
        self._load()
        return str(context.worker)

    def _load(self) -> None:
        self._device.held[self._profile.name] = self._profile.resident(self._owned, self._num_devices)

    def _at(self, step_context: StepContext) -> EmulatedDevice:
        """Returns the device; at the start of an iteration its clock is advanced."""
        start, device = step_context.message, self._device
        if isinstance(start, Start) and start != device.start:
            device.start, device.free_s, device.spans = start, max(device.free_s, start.begin_s), []
        return device

    def onload(self, step_context: StepContext) -> None:
        self._at(step_context).work(0.0, self._profile.onload_s)
        self._load()

    def offload(self, step_context: StepContext) -> None:
        self._at(step_context).work(0.0, self._profile.offload_s)
        self._device.held[self._profile.name] = self._profile.offloaded_bytes

    def entered(self, step_context: StepContext, *earlier: Receipt) -> float:
        """Waits for calls of this method on other devices; returns when the device is free, in emulated seconds."""
        device = self._at(step_context)
        return device.work(max([cast(float, receipt.report) for receipt in earlier], default=0.0), 0.0)

    # ------------------------------------------------------------------------------------------------------------- leaf
    def run(self, step_context: StepContext, inputs: Mapping[int, Sequence[Parcel]]) -> Output:
        """Processes some blocks; a stage with a distribution of lengths returns the blocks that finish first."""
        device, parcels = self._at(step_context), [parcel for parts in inputs.values() for parcel in parts]
        begin_s, seconds = max(device.free_s, self._arrival_s(parcels)), self._seconds(len(inputs))
        if self._profile.finish_quantiles and step_context.num_chunks > 1:
            owned = len(self._blocks)  # all of them start at once
            before = sum(block < min(inputs, default=0) for block in self._blocks) / owned
            seconds = self._seconds(owned) * self._profile.finish_share(before, before + len(inputs) / owned)
        if self._group.size > 1:
            times = self._group.exchange([begin_s, seconds], [2] * self._group.size)  # pyright: ignore[reportArgumentType]
            begin_s, seconds = (max(float(pair[i]) for pair in times) for i in range(2))
        return self._output(self._done("run", inputs, begin_s, seconds))

    # ------------------------------------------------------------------------------------------------------------- loop
    def open(self, step_context: StepContext, blocks: Sequence[int]) -> dict[int, Parcel]:
        return self._done("open", blocks, self._at(step_context).free_s, 0.0)

    def step(self, step_context: StepContext, messages: Mapping[int, Parcel]) -> dict[int, Parcel]:
        self._at(step_context)
        seconds = self._seconds(len(messages))
        return self._done("step", messages, self._arrival_s(messages.values()), seconds)

    def close(self, step_context: StepContext, messages: Mapping[int, Parcel | None]) -> Output:
        """Ends the loop; the answering side evaluates the last messages."""
        self._at(step_context)
        parcels = [parcel for parcel in messages.values() if parcel is not None]
        fraction = self._profile.bootstrap_fraction if self._config.answers else 0.0
        seconds = fraction * self._seconds(len(messages))
        return self._output(self._done("close", messages, self._arrival_s(parcels), seconds))

    # ---------------------------------------------------------------------------------------------------------- weights
    def export_weights(self, step_context: StepContext) -> Parcel:
        end_s = self._at(step_context).work(0.0, self._config.exports.export_s)
        return Parcel(self._profile.name, self._device.number, end_s)

    def install_weights(self, step_context: StepContext, parcel: Parcel) -> Finish:
        device, installs = self._at(step_context), self._config.installs
        end_s = device.work(self._arrival_s([parcel], installs.bytes), installs.install_s)
        return Finish(end_s, device.peak_bytes, device.start)

    # ----------------------------------------------------------------------------------------------------- small pieces
    def _done(self, method: str, blocks: Iterable[int], begin_s: float, seconds: float) -> dict[int, Parcel]:
        name, device, processed = self._profile.name, self._device, list(blocks)
        items = len(processed) * self._config.items_per_block
        working_bytes = self._profile.working(items, self._num_devices) if seconds else 0.0
        needed = sum(device.held.values()) + working_bytes
        device.peak_bytes = max(device.peak_bytes, needed)
        held = ", ".join(f"{stage} {num_bytes / 1e9:.2f}" for stage, num_bytes in device.held.items())
        assert needed <= device.memory_bytes * (1 + 1e-9), (  # the plan is infeasible, or did not switch
            f"device {device.number} has {device.memory_bytes / 1e9:.2f} GB, but a call of {name} needs "
            f"{needed / 1e9:.2f}: held are {held}, working bytes {working_bytes / 1e9:.2f}"
        )
        end_s = device.work(begin_s, seconds)
        device.spans.append(Span(f"{name}.{method}", name, device.number, "emulated", end_s - seconds, end_s))
        return {block: Parcel(name, device.number, end_s, place) for place, block in enumerate(processed)}

    def _output(self, parcels: dict[int, Parcel]) -> Output:
        device = self._device
        spans = tuple(device.spans)
        return Output(parcels, Finish(spans[-1].end_s, device.peak_bytes, device.start, spans))

    def _seconds(self, num_blocks: int) -> float:
        seconds = self._profile.call_s(num_blocks * self._config.items_per_block, self._num_devices)
        return seconds * self._config.slowdown[self._device.number]

    def _arrival_s(self, parcels: Iterable[Parcel], num_bytes: float | None = None) -> float:
        """Returns when all parcels have arrived: each device sends, and this one receives, one parcel after the other.

        `num_bytes`: the size of each parcel; None: that of its edge.
        """
        sent, cluster, receiver = [], self._config.cluster, self._device.number
        for parcel in parcels:
            size = self._config.bytes_per_block.get(parcel.stage, 0.0) if num_bytes is None else num_bytes
            near = cluster.place_of(parcel.device).node == cluster.place_of(receiver).node
            rate = cluster.links.within_node_bytes_per_s if near else cluster.links.across_nodes_bytes_per_s
            wire_s = 0.0 if parcel.device == receiver else size / rate
            latency_s = cluster.links.latency_s if wire_s else 0.0
            sent.append((parcel.ready_s + parcel.place * wire_s + latency_s, wire_s))
        arrival_s = 0.0
        for sent_s, wire_s in sorted(sent):
            arrival_s = max(arrival_s, sent_s) + wire_s
        return arrival_s
