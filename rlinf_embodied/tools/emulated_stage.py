"""What an emulated worker runs: stages that sleep instead of computing, on a device with a clock and a memory.

    Parcel      stands for a block's data: where it lies and when, in emulated seconds, it was ready
    arrival     its ready_s plus the wire, if it lies on another device: both ends serve one parcel at a time
    call        begins when the device is free and everything has arrived, takes what the profile says, and returns when
                the wall clock shows the end: start + end_s * scale

Executor, workers, messages, waiting and locks are the real ones; only the work is replaced.  Each call sleeps until a
deadline that follows from the deadlines of its inputs, not for a duration that starts when it got round to it.  So the
overhead of a hop (a millisecond, which a time scale of 0.02 would turn into 50) does not add up along a chain of calls
as long as the machine keeps up; where it does not, calls end late on the wall clock, and the result says by how much.
A wrong order of submission or a missed overlap shows all the same: a worker takes its calls one after the other.

Nothing here imports torch: a sleeping worker needs no core and little memory.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.planning.profile import StageProfile, WeightProfile
from rlinf_embodied.runtime.host import Output, StageContext, StepContext

NO_WEIGHTS = WeightProfile(0.0)


@dataclass(frozen=True, slots=True)
class Start:
    """The message of every step: when the iteration began, and wall seconds per emulated second."""

    iteration: int
    wall_s: float  # on the wall clock
    scale: float
    begin_s: float = 0.0  # in emulated seconds: nothing that is submitted in it begins earlier


@dataclass(frozen=True, slots=True)
class Parcel:
    """Stands for a block's data, or for weights."""

    stage: str  # that made it
    device: int
    ready_s: float  # emulated seconds
    place: int = 0  # among the blocks of its call: they leave the device one after the other


@dataclass(frozen=True, slots=True)
class Finish:
    """A stage's report: when its call ended, and what its device held at most since the run began."""

    end_s: float
    peak_bytes: float
    start: Start


@dataclass(frozen=True, slots=True)
class EmulatedStageConfig:
    """What a stage needs to know of itself and of the cluster."""

    run: str  # stages of one run share their device's clock and memory
    profile: StageProfile
    items_per_block: int
    cluster: Cluster
    slowdown: tuple[float, ...]  # of this stage on each device
    answers: bool = False  # the answering side of a loop
    bytes_per_block: Mapping[str, float] = field(default_factory=dict)  # from each source
    exports: WeightProfile = NO_WEIGHTS
    installs: WeightProfile = NO_WEIGHTS


class EmulatedDevice:
    """The clock and the memory of one device; the stages of its worker share it."""

    def __init__(self, number: int, memory_bytes: float) -> None:
        self.number = number
        self._memory_bytes = memory_bytes
        self.start = Start(-1, 0.0, 0.0)
        self._held: dict[str, float] = {}  # bytes of each stage, loaded or offloaded
        self._free_s = 0.0
        self.peak_bytes = 0.0

    def at(self, step_context: StepContext) -> None:
        """Sets the clock forward where a new iteration begins."""
        if isinstance(step_context.message, Start) and step_context.message != self.start:
            self.start, self._free_s = step_context.message, max(self._free_s, step_context.message.begin_s)

    def hold(self, stage: str, num_bytes: float) -> None:
        """Notes what a stage holds from now on, loaded or offloaded."""
        self._held[stage] = num_bytes

    def require(self, stage: str, working_bytes: float) -> None:
        """Checks that a call of a stage fits in memory together with everything that is held.

        Raises:
            AssertionError: it does not: the plan was infeasible, or its switches were not made.
        """
        needed = sum(self._held.values()) + working_bytes
        self.peak_bytes = max(self.peak_bytes, needed)
        held = ", ".join(f"{name} {num_bytes / 1e9:.2f}" for name, num_bytes in self._held.items())
        assert needed <= self._memory_bytes * (1 + 1e-9), (
            f"device {self.number} has {self._memory_bytes / 1e9:.2f} GB, but a call of {stage} needs "
            f"{needed / 1e9:.2f}: held are {held}, working bytes {working_bytes / 1e9:.2f}"
        )

    def switch(self, seconds: float) -> None:
        """Offloads or onloads something when the calls so far are done."""
        self.work(self._free_s, seconds)

    @property
    def free_s(self) -> float:
        """When the device has done all calls so far."""
        return self._free_s

    def work(self, begin_s: float, seconds: float) -> float:
        """Is busy for `seconds` from `begin_s` on, and returns the end."""
        self._free_s = max(begin_s, self._free_s) + seconds
        deadline = self.start.wall_s + (self._free_s - self.start.begin_s) * self.start.scale
        time.sleep(max(0.0, deadline - time.time()))
        return self._free_s


class EmulatedStage:
    """Any stage of a workflow, on emulated devices: leaf, either side of a loop, source and target of weights."""

    def __init__(self, config: EmulatedStageConfig) -> None:
        self._config = config

    def setup(self, context: StageContext) -> None:
        """Takes its place in the memory of its worker's device."""
        config = self._config
        memory = config.cluster.place_of(context.worker).group.memory_bytes
        key = f"emulated device of {config.run}"
        device = context.share(key, lambda: EmulatedDevice(context.worker, memory))
        assert isinstance(device, EmulatedDevice)
        self._device, self._group = device, context.group
        self._num_devices = len(set(context.owners))
        self._blocks = context.blocks
        self._owned = len(context.blocks) * config.items_per_block
        self.onload(None)

    # -------------------------------------------------------------------------------------------------------- switching
    def onload(self, step_context: StepContext | None) -> None:
        """Comes (back) into the device's memory."""
        profile = self._config.profile
        if step_context is not None:
            self._device.at(step_context)
            self._device.switch(profile.onload_s)
        self._device.hold(profile.name, float(profile.resident(self._owned, self._num_devices)))

    def offload(self, step_context: StepContext) -> None:
        profile = self._config.profile
        self._device.at(step_context)
        self._device.switch(profile.offload_s)
        self._device.hold(profile.name, profile.offloaded_bytes)

    # ------------------------------------------------------------------------------------------------------------- leaf
    def run(self, step_context: StepContext, inputs: Mapping[int, Sequence[Parcel]]) -> Output:
        """Works on some blocks; a stage with a length distribution hands on what is finished by then."""
        seconds = self._seconds(len(inputs))
        self._device.at(step_context)
        begin_s = max(self._device.free_s, self._arrival_s(parcel for parts in inputs.values() for parcel in parts))
        if self._config.profile.finish_quantiles and step_context.num_chunks > 1:
            seconds = self._streamed_s(inputs)
        if self._group.size > 1:
            met = self._group.exchange([begin_s, seconds], [2] * self._group.size)  # pyright: ignore[reportArgumentType]
            begin_s, seconds = (max(float(given[i]) for given in met) for i in range(2))
        return self._done(inputs, begin_s, seconds)

    def _streamed_s(self, blocks: Collection[int]) -> float:
        """Returns the further seconds until some of the owned blocks, all begun at once, are finished."""
        share = self._config.profile.finish_share
        before = sum(block < min(blocks, default=0) for block in self._blocks) / len(self._blocks)
        after = before + len(blocks) / len(self._blocks)
        return self._seconds_of(self._owned) * float(share(after) - (share(before) if before else 0.0))

    # ------------------------------------------------------------------------------------------------------------- loop
    def open(self, step_context: StepContext, blocks: Sequence[int]) -> dict[int, Parcel]:
        """Shows what there is at the start of a loop."""
        self._device.at(step_context)
        return dict(self._done(blocks, self._device.free_s, 0.0).blocks)  # pyright: ignore[reportReturnType]

    def step(self, step_context: StepContext, messages: Mapping[int, Parcel]) -> dict[int, Parcel]:
        """Takes one turn for a shard."""
        self._device.at(step_context)
        seconds = self._seconds(len(messages))
        return dict(self._done(messages, self._arrival_s(messages.values()), seconds).blocks)  # pyright: ignore[reportReturnType]

    def close(self, step_context: StepContext, messages: Mapping[int, Parcel | None]) -> Output:
        """Ends the loop; the answering side values what it is shown last."""
        self._device.at(step_context)
        shown = [parcel for parcel in messages.values() if parcel is not None]
        fraction = self._config.profile.bootstrap_fraction if self._config.answers else 0.0
        seconds = fraction * self._seconds(len(messages))
        return self._done(messages, self._arrival_s(shown), seconds)

    # ---------------------------------------------------------------------------------------------------------- weights
    def export_weights(self, step_context: StepContext) -> Parcel:
        """Gathers the weights."""
        self._device.at(step_context)
        end_s = self._device.work(self._device.free_s, self._config.exports.export_s)
        return Parcel(self._config.profile.name, self._device.number, end_s)

    def install_weights(self, step_context: StepContext, parcel: Parcel) -> Finish:
        """Receives the weights and puts them in place."""
        self._device.at(step_context)
        installs = self._config.installs
        arrival_s = parcel.ready_s + self._wire_s(parcel.device, installs.bytes)
        return self._finish(self._device.work(arrival_s, installs.install_s))

    # ----------------------------------------------------------------------------------------------------- small pieces
    def _done(self, blocks: Iterable[int], begin_s: float, seconds: float) -> Output:
        name, chosen = self._config.profile.name, list(blocks)
        items = len(chosen) * self._config.items_per_block
        working = float(self._config.profile.working(items, self._num_devices)) if seconds else 0.0
        self._device.require(name, working)
        end_s = self._device.work(begin_s, seconds)
        parcels = {block: Parcel(name, self._device.number, end_s, place) for place, block in enumerate(chosen)}
        return Output(parcels, self._finish(end_s))

    def _finish(self, end_s: float) -> Finish:
        return Finish(end_s, self._device.peak_bytes, self._device.start)

    def _seconds(self, num_blocks: int) -> float:
        return self._seconds_of(num_blocks * self._config.items_per_block)

    def _seconds_of(self, items: int) -> float:
        config = self._config
        return float(config.profile.call_s(items, self._num_devices)) * config.slowdown[self._device.number]

    def _arrival_s(self, parcels: Iterable[Parcel]) -> float:
        """Returns when everything is here: each device sends, and this one receives, one parcel after the other."""
        sent = []
        for parcel in parcels:
            size = self._config.bytes_per_block.get(parcel.stage, 0.0)
            here = parcel.device == self._device.number
            wire_s = 0.0 if here or not size else size / self._rate(parcel.device)
            latency_s = self._config.cluster.links.latency_s if wire_s else 0.0
            sent.append((parcel.ready_s + parcel.place * wire_s + latency_s, wire_s))
        arrival_s = 0.0
        for left_s, wire_s in sorted(sent):
            arrival_s = max(arrival_s, left_s) + wire_s
        return arrival_s

    def _wire_s(self, source: int, num_bytes: float) -> float:
        if source == self._device.number or not num_bytes:
            return 0.0
        return num_bytes / self._rate(source) + self._config.cluster.links.latency_s

    def _rate(self, source: int) -> float:
        cluster = self._config.cluster
        same = cluster.place_of(source).node == cluster.place_of(self._device.number).node
        return cluster.links.within_node_bytes_per_s if same else cluster.links.across_nodes_bytes_per_s
