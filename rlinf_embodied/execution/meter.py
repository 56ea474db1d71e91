"""What a profile needs of the workers beside times: their memory, the bytes that leave them, and the wire between them.

MeteredSession stands between an executor and a session: it measures memory around each stage that is built, and keeps
what stages answered so that their bytes can be counted.  Meter and Echo are stages of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from rlinf_embodied import device as devices
from rlinf_embodied.execution.disturbance import waited_s
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.runtime.host import Call, Receipt, StageContext, StepContext, WorkerSpec
from rlinf_embodied.runtime.session import Ref, Session, of_type
from rlinf_embodied.runtime.tensor_wire import map_leaves
from rlinf_embodied.workflow.graph import StageSpec

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_HOPS, _ROUNDS = 6, 3
_SMALL, _LARGE = 256, 4 << 20  # bytes per payload


@dataclass(frozen=True, slots=True)
class Reading:
    """A worker at one moment: bytes of its device in use, and at most since the last reset; seconds since its start."""

    used_bytes: float
    peak_bytes: float
    cpu_s: float
    waited_s: float = 0.0  # for a core
    process: int = 0


class Meter:
    """A stage that reads its worker's memory: that of its accelerator, or the resident pages of its process."""

    def __init__(self, config: None) -> None:
        """Needs nothing."""

    def setup(self, context: StageContext) -> None:
        """Learns which device it is to read."""
        self._device = context.device
        self._of_device = devices.is_accelerator(context.device)

    def reset(self, step_context: StepContext) -> None:
        """Starts a new maximum."""
        if self._of_device:
            devices.reset_peak(self._device)
        elif _CLEAR.exists():
            _CLEAR.write_text("5")  # Linux: the high-water mark becomes what is resident now

    def read(self, step_context: StepContext) -> Reading:
        """Returns memory and CPU seconds."""
        cpu = sum(os.times()[:2])
        if self._of_device:
            memory = devices.memory(self._device)
            used = memory.total - memory.free  # the simulator's memory counts too, which torch does not know of
            return Reading(used, used + memory.peak - memory.allocated, cpu, waited_s(), os.getpid())
        used = float(psutil.Process().memory_info().rss)
        return Reading(used, max(used, _high_water_bytes()), cpu, waited_s(), os.getpid())

    def count(self, step_context: StepContext, payload: object) -> float:
        """Returns the bytes of a payload."""
        return payload_bytes(payload)


def _high_water_bytes() -> float:
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    return next((1024.0 * float(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0.0)


class Echo:
    """A stage that hands on what it gets: two of them measure the wire."""

    def __init__(self, config: None) -> None:
        """Needs nothing."""

    def setup(self, context: StageContext) -> None:
        """Needs nothing."""

    def step(self, step_context: StepContext, payloads: Mapping[int, object]) -> dict[int, object]:
        """Returns new payloads: bytes of step_context.chunk_step in the first call, otherwise what came."""
        if any(value is None for value in payloads.values()):
            return {block: torch.zeros(step_context.chunk_step, dtype=torch.uint8) for block in payloads}
        return dict(payloads)


METER = StageSpec("profiler.meter", f"{__name__}.Meter", None)
ECHO = StageSpec("profiler.echo", f"{__name__}.Echo", None)


def _leaving(call: Call, refs: Sequence[Ref]) -> list[Ref]:
    """Returns the block results that do not stay in their worker; both sides of a loop answer for each block."""
    return [ref for block, ref in zip(call.blocks * 2, refs[:-1], strict=False) if block not in call.keep]


def payload_bytes(value: object) -> float:
    """Returns the bytes of all tensors and arrays in a nested payload."""
    total = 0.0

    def count(leaf: object) -> object:
        nonlocal total
        if isinstance(leaf, torch.Tensor):
            total += leaf.numel() * leaf.element_size()
        elif isinstance(leaf, np.ndarray):
            total += leaf.nbytes
        return leaf

    map_leaves(value, count)
    return total


def context_of(worker: int, device: str, num_blocks: int = 1) -> StageContext:
    """Returns the context of a stage of one worker."""
    blocks = tuple(range(num_blocks))
    return StageContext(worker, device, blocks, (blocks,), num_blocks, (0,) * num_blocks, SoloGroup(), {})


class MeteredSession:
    """A session that measures what passes through it, and otherwise is the one inside."""

    def __init__(self, inner: Session) -> None:
        self._inner = inner
        self._devices: dict[int, str] = {}
        self.empty: dict[int, Reading] = {}  # of each worker, before it had these stages
        self._first: dict[int, float] = {}  # bytes of each worker, before it had any
        self.overhead: dict[int, float] = {}  # bytes that each keeps of its first stages: libraries, contexts
        self.grown: dict[str, dict[int, float]] = {}  # bytes by which setting up a stage made each worker larger
        self.answers: list[tuple[Call, list[Ref]]] = []  # that left their workers, while `recording`
        self.recording = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    @property
    def relays(self) -> bool:
        """While it records, everything passes the driver, which measures it."""
        return self._inner.relays and not self.recording

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        """Starts the workers, each with a meter."""
        self._inner.start(workers)
        self._devices |= {spec.worker: spec.device for spec in workers}
        self.restart()

    def restart(self) -> None:
        """Builds the meters of all workers so far, which have no other stages, and reads them."""
        self._inner.add_stage(METER, [context_of(worker, device) for worker, device in self._devices.items()])
        self.empty = self.readings()
        for worker, reading in self.empty.items():
            if worker in self._first:
                self.overhead.setdefault(worker, max(0.0, reading.used_bytes - self._first[worker]))
            self._first.setdefault(worker, reading.used_bytes)

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        """Builds a stage and notes what its workers grew by."""
        before = self.readings() if not contexts[0].exclusive else self.empty  # the others have left
        facts = self._inner.add_stage(spec, contexts)
        after = self.readings()
        self.grown[spec.name] = {
            c.worker: max(0.0, after[c.worker].used_bytes - before[c.worker].used_bytes) for c in contexts
        }
        return facts

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        """Submits, and keeps the references of what leaves a worker if it is recorded."""
        answers = self._inner.submit(calls, collective)
        if self.recording:
            self.answers += [(call, _leaving(call, refs)) for (_, call, _), refs in zip(calls, answers, strict=True)]
        return answers

    def clear(self) -> None:
        """Forgets all stages and answers."""
        self.answers = []
        self._inner.clear()

    # -------------------------------------------------------------------------------------------------------- readings
    def ask(
        self,
        worker: int,
        stage: str,
        method: str,
        step_context: StepContext | None = None,
        payloads: Sequence[Ref] = (),
    ) -> object:
        """Returns what a stage of one worker answers."""
        call = Call(stage, method, step_context or StepContext(0))
        ((receipt,),) = self._inner.submit([(worker, call, payloads)])
        return of_type(self._inner.fetch([receipt], f"{stage}.{method}"), Receipt)[0].report

    def seconds_of(
        self, worker: int, stage: str, method: str, step_context: StepContext, payloads: Sequence[Ref] = ()
    ) -> float:
        """Returns the seconds that a call of a stage of one worker takes."""
        start = time.perf_counter()
        self.ask(worker, stage, method, step_context, payloads)
        return time.perf_counter() - start

    def publish(self, worker: int, stage: str, method: str, step_context: StepContext) -> Ref:
        """Returns a reference to what a stage of one worker answers, as soon as it is there."""
        ((value, receipt),) = self._inner.submit([(worker, Call(stage, method, step_context, publishes=True), [])])
        self._inner.fetch([receipt], f"{stage}.{method}")
        return value

    def readings(self) -> dict[int, Reading]:
        """Returns the memory of every worker."""
        found = {worker: self.ask(worker, METER.name, "read") for worker in self._devices}
        return dict(zip(found, of_type(found.values(), Reading), strict=True))

    def reset_peaks(self) -> None:
        """Starts new maxima in every worker."""
        for worker in self._devices:
            self.ask(worker, METER.name, "reset")

    def bytes_per_block(self, stage: str, method: str) -> float | None:
        """Returns the bytes of a stage's answer for a block (the largest of the first few); None if none left."""
        mine = [refs for call, refs in self.answers if refs and (call.stage, call.method) == (stage, method)]
        values = [value for refs in mine[:2] for value in self._inner.fetch(refs, f"{stage}.{method}")]
        return max((payload_bytes(value) for value in values), default=None)


def measure_links(session: Session, devices: Mapping[int, str], num_blocks: int) -> tuple[float, float]:
    """Returns the seconds of a hop with that many blocks, and the bytes per second beyond, between two workers.

    A payload goes back and forth; nobody computes.
    """
    first, second = list(devices)[:2]
    session.add_stage(ECHO, [context_of(first, devices[first], num_blocks)])
    session.add_stage(ECHO, [context_of(second, devices[second], num_blocks)])
    _bounce(session, (first, second), num_blocks, _SMALL, 4)
    # the quickest of a few rounds: what else the machine does makes a hop longer, never shorter
    small = min(_bounce(session, (first, second), num_blocks, _SMALL, _HOPS) for _ in range(_ROUNDS))
    large = min(_bounce(session, (first, second), num_blocks, _LARGE, _HOPS) for _ in range(_ROUNDS))
    extra_bytes = num_blocks * (_LARGE - _SMALL)
    return max(small, 1e-6), extra_bytes / max(large - small, 1e-6)


def _bounce(session: Session, workers: tuple[int, int], num_blocks: int, num_bytes: int, hops: int) -> float:
    """Returns seconds per hop of payloads of so many bytes for each block."""
    blocks = tuple(range(num_blocks))
    make = Call(ECHO.name, "step", StepContext(0, chunk_step=num_bytes), blocks)
    (refs,) = session.submit([(workers[0], make, [])])
    session.fetch([refs[-1]], "profiler.echo")
    start = time.perf_counter()
    receipts = []
    for hop in range(hops):
        call = Call(ECHO.name, "step", StepContext(0, chunk_step=num_bytes), blocks, 1)
        (refs,) = session.submit([(workers[(hop + 1) % 2], call, refs[:num_blocks])])
        receipts.append(refs[-1])
    session.fetch(receipts, "profiler.echo")
    return (time.perf_counter() - start) / hops
