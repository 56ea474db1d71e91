"""Measures the memory of workers and the bytes that leave them, for a profile.

MeteredSession is a wrapper of a session; Meter is a stage that it adds to each worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from rlinf_embodied import device as devices
from rlinf_embodied.runtime.host import Call, Receipt, StageContext, StepContext, WorkerSpec, solo_context
from rlinf_embodied.runtime.session import Ref, Session, of_type
from rlinf_embodied.workflow.graph import StageSpec

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Reading:
    """A worker's memory and CPU time: bytes in use, their peak since the last reset, CPU seconds since its start."""

    used_bytes: float
    peak_bytes: float
    cpu_s: float


class Meter:
    """A stage that reads its worker's memory: of its accelerator, or the resident pages of its process."""

    def __init__(self, config: None) -> None:
        pass

    def setup(self, context: StageContext) -> None:
        self._device = context.device
        self._of_device = devices.is_accelerator(context.device)

    def reset(self, step_context: StepContext) -> None:
        """Resets the peak."""
        if self._of_device:
            devices.reset_peak(self._device)
        elif _CLEAR.exists():
            _CLEAR.write_text("5")  # Linux: the high-water mark becomes what is resident now

    def read(self, step_context: StepContext) -> Reading:
        cpu = sum(os.times()[:2])
        if self._of_device:
            return Reading(*devices.used_bytes(self._device), cpu)
        used = float(psutil.Process().memory_info().rss)
        lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
        peak = next((1024.0 * float(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0.0)
        return Reading(used, max(used, peak), cpu)

    def peak(self, step_context: StepContext) -> float:
        """Returns the peak since the last reset, and resets it."""
        peak_bytes = self.read(step_context).peak_bytes
        self.reset(step_context)
        return peak_bytes


METER = StageSpec("profiler.meter", f"{__name__}.Meter", None)


class MeteredSession:
    """A session that measures the calls it passes on to another session."""

    def __init__(self, inner: Session) -> None:
        self._inner = inner
        self._devices: dict[int, str] = {}
        self.empty: dict[int, Reading] = {}  # of each worker, before the present stages were built
        self._first: dict[int, float] = {}  # bytes of each worker, before it had any stages
        self.start_bytes: dict[int, float] = {}  # the same of a process; 0 on an accelerator, which others use as well
        self.overhead: dict[int, float] = {}  # bytes that each keeps after its first stages: libraries, contexts
        self.grown: dict[str, dict[int, float]] = {}  # growth of each worker by setting up a stage, in bytes
        self._recorded: list[tuple[Call, int, Ref, Ref]] = []  # calls, workers, receipts and peaks, while `recording`
        self.recording = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    @property
    def relays(self) -> bool:
        """False while it records: the messages of loops then go through the driver's calls, which count their bytes."""
        return self._inner.relays and not self.recording

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        self._inner.start(workers)
        self._devices |= {spec.worker: spec.device for spec in workers}
        self.restart()

    def restart(self) -> None:
        """Builds a meter in each worker, none of which has other stages, and reads it."""
        self._inner.add_stage(
            METER, [solo_context((0,), device, worker=worker) for worker, device in self._devices.items()]
        )
        self.empty = self.readings()
        for worker, reading in self.empty.items():
            if worker in self._first:
                self.overhead.setdefault(worker, max(0.0, reading.used_bytes - self._first[worker]))
            self._first.setdefault(worker, reading.used_bytes)
            used = 0.0 if devices.is_accelerator(self._devices[worker]) else reading.used_bytes
            self.start_bytes.setdefault(worker, used)

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        """Builds a stage and records the growth of its workers."""
        before = self.readings() if not contexts[0].exclusive else self.empty  # the other stages are offloaded
        facts = self._inner.add_stage(spec, contexts)
        after = self.readings()
        grown = {c.worker: after[c.worker].used_bytes - before[c.worker].used_bytes for c in contexts}
        self.grown[spec.name] = {worker: max(0.0, num_bytes) for worker, num_bytes in grown.items()}
        return facts

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        """Submits calls; while it records, the bytes of results are counted and each call's memory peak is read."""
        if not self.recording:
            return self._inner.submit(calls, collective)
        answers = self._inner.submit([(w, replace(c, counts_bytes=True), p) for w, c, p in calls], collective)
        read = Call(METER.name, "peak", StepContext(0))
        peaks = self._inner.submit([(worker, read, []) for worker, _, _ in calls])
        for (worker, call, _), refs, peak in zip(calls, answers, peaks, strict=True):
            self._recorded.append((call, worker, refs[-1], peak[-1]))
        return answers

    def clear(self) -> None:
        self._recorded = []
        self._inner.clear()

    def forget(self) -> None:
        """Discards the records, and resets the peaks of all workers."""
        self._recorded = []
        self.ask(list(self._devices), METER.name, "reset")

    def ask(
        self, workers: Sequence[int], stage: str, method: str, iteration: int = 0, payloads: Sequence[Ref] = ()
    ) -> list[object]:
        """Calls a method of a stage in each of these workers and returns the answers."""
        calls = [(worker, Call(stage, method, StepContext(iteration)), payloads) for worker in workers]
        receipts = self._inner.fetch([refs[-1] for refs in self._inner.submit(calls)], f"{stage}.{method}")
        return [receipt.report for receipt in of_type(receipts, Receipt)]

    def seconds_of(self, worker: int, stage: str, method: str, iteration: int, payloads: Sequence[Ref] = ()) -> float:
        start = time.perf_counter()
        self.ask([worker], stage, method, iteration, payloads)
        return time.perf_counter() - start

    def publish(self, worker: int, stage: str, method: str, step_context: StepContext) -> tuple[Ref, int]:
        """Calls a method of a stage in one worker; returns a reference to its result and the result's bytes."""
        call = Call(stage, method, step_context, publishes=True, counts_bytes=True)
        ((value, ref),) = self._inner.submit([(worker, call, [])])
        (receipt,) = of_type(self._inner.fetch([ref], f"{stage}.{method}"), Receipt)
        return value, receipt.num_bytes[0]

    def readings(self) -> dict[int, Reading]:
        readings = self.ask(list(self._devices), METER.name, "read")
        return dict(zip(self._devices, of_type(readings, Reading), strict=True))

    def peaks(self) -> dict[tuple[str, int], float]:
        """Returns by stage and worker the peak bytes of the worker over all recorded calls of the stage."""
        receipts = self._inner.fetch([ref for *_, ref in self._recorded], f"{METER.name}.peak")
        peaks: dict[tuple[str, int], float] = {}
        for (call, worker, *_), receipt in zip(self._recorded, of_type(receipts, Receipt), strict=True):
            assert isinstance(receipt.report, float)
            for stage in call.makers if call.method != "enter" else ():  # before `enter`, other stages are in memory
                peaks[stage, worker] = max(peaks.get((stage, worker), 0.0), receipt.report)
        return peaks

    def bytes_per_block(self) -> dict[tuple[str, str], int]:
        """Returns by stage and method the bytes of the largest result for one block, over all recorded calls."""
        sizes: dict[tuple[str, str], int] = {}
        receipts = of_type(self._inner.fetch([ref for _, _, ref, _ in self._recorded], "receipts"), Receipt)
        for (call, *_), receipt in zip(self._recorded, receipts, strict=True):
            for maker, size in zip(call.makers, receipt.num_bytes, strict=False):
                key = maker, "close" if call.method == "loop" else call.method
                sizes[key] = max(sizes.get(key, 0), size)
        return sizes
