"""Weights from one worker to others of its node, beside what Ray's object store does with as many bytes.

python -m experiments.bench.weights [gb=1] [workers=8] [rounds=5] [ways=weights,copied,mapped] [out=weights.json]

weights   Executor.send_weights: exported with a checksum, one copy in the store, verified and installed from there
copied    one ray.put of a numpy array, and a ray.get with a copy of it in every worker at once
mapped    one ray.put of a numpy array, and a ray.get in every worker at once, none of which reads it

The arms take turns.  GB/s are bytes times receiving workers by seconds.  What the driver's memory grows by at most is
the kernel's own count (VmHWM).  At its peak all of it takes twice gb for each of the workers, once without `copied`,
and three times gb in the store.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import ray

from experiments.bench.harness import Benchmark, Report, Run, Spread, Table, alternate, chosen
from rlinf_embodied.cluster.hardware import store_bytes
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.execution.executor import Executor
from rlinf_embodied.learning.groups import SoloGroup
from rlinf_embodied.runtime.host import StageContext, StepContext, WorkerSpec
from rlinf_embodied.runtime.ray_session import RaySession
from rlinf_embodied.workflow.graph import StageSpec

STAGE = "holder"
HEADER = ("way", "seconds", "GB/s", "driver grew by, MB")
_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_ROOM = 3  # versions of the weights that the store has room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments."""

    gb: float = 1.0  # 10^9 bytes
    workers: int = 8  # that receive
    rounds: int = 5
    ways: str = ""  # "": all
    out: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """One transfer to all workers."""

    seconds: float
    driver_bytes: float  # that the driver's memory grew by, at most
    parts: dict[str, float]  # seconds of the longest of each method


class _End:
    """A process without torch that puts or gets an array."""

    def put(self, num_bytes: int) -> list[ray.ObjectRef]:
        return [ray.put(np.ones(num_bytes, np.uint8))]

    def get(self, refs: list[ray.ObjectRef], copied: bool) -> int:
        array = ray.get(refs[0])
        return int((array.copy() if copied else array)[-1])


def _status_bytes(name: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return 1024.0 * float(line.split()[1])


class Ways:
    """The workers, and the ways to reach them."""

    def __init__(self, own: Options) -> None:
        """Starts a worker that sends, those that receive, and as many processes of Ray's alone."""
        self._bytes, self._workers, self._iteration = int(own.gb * 1e9) // 4 * 4, range(own.workers), 0
        self.session = RaySession(object_store_bytes=max(store_bytes(), _ROOM * self._bytes))
        devices = range(own.workers + 1)
        self.session.start([WorkerSpec(k, "cpu") for k in devices])
        contexts = [StageContext(k, "cpu", (k,), ((k,),), len(devices), (0,), SoloGroup(), {}) for k in devices]
        self.session.add_stage(StageSpec(STAGE, "experiments.bench.weights.stages.Holder", self._bytes), contexts)
        end = ray.remote(_End).options(num_cpus=0)
        self._ends = [end.remote() for _ in devices]

    def weights(self) -> Sent:
        """Sends a version of the weights, and checks that it is everywhere."""
        self._iteration += 1
        step, targets = StepContext(self._iteration), [(1 + k, STAGE) for k in self._workers]
        _CLEAR.write_text("5")
        before, start = _status_bytes("VmRSS"), time.perf_counter()
        receipts = Executor.send_weights(self.session, (0, STAGE), targets, step)
        seconds = time.perf_counter() - start
        parts: dict[str, float] = {}
        for span in (span for receipt in receipts for span in receipt.spans):
            parts[span.name] = max(parts.get(span.name, 0.0), span.duration_s)
        installed = {receipt.report for receipt in receipts[1:]}
        assert installed == {float(self._iteration)}, f"{installed} were installed instead of {self._iteration}"
        return Sent(seconds, _status_bytes("VmHWM") - before, parts)

    def copied(self) -> Sent:
        """Has one process put an array, and the others get and copy it."""
        return self._store(True)

    def mapped(self) -> Sent:
        """Has one process put an array, and the others get it."""
        return self._store(False)

    def _store(self, copied: bool) -> Sent:
        _CLEAR.write_text("5")
        before, start = _status_bytes("VmRSS"), time.perf_counter()
        refs = ray.get(self._ends[0].put.remote(self._bytes))
        put_s = time.perf_counter() - start
        ray.get([end.get.remote(refs, copied) for end in self._ends[1:]])
        return Sent(time.perf_counter() - start, _status_bytes("VmHWM") - before, {"put": put_s})


def measure(run: Run[Options]) -> Report:
    """Lets the ways take turns."""
    own = run.options
    if own.gb <= 0 or own.workers < 1 or own.rounds < 1:
        raise ConfigError(f"gb={own.gb}, workers={own.workers}, rounds={own.rounds}: all are positive")
    arms = chosen(own.ways, {"weights": Ways.weights, "copied": Ways.copied, "mapped": Ways.mapped})
    ways = Ways(own)
    try:
        found = alternate({name: partial(arm, ways) for name, arm in arms.items()}, own.rounds, warm_up=1)
    finally:
        ways.session.close()
    seconds = {name: Spread.of(sent.seconds for sent in every) for name, every in found.items()}
    rates = {name: Spread.of(own.gb * own.workers / sent.seconds for sent in every) for name, every in found.items()}
    grown = {name: max(sent.driver_bytes for sent in every) / 1e6 for name, every in found.items()}
    rows = [(name, f"{seconds[name]:.2f}", f"{rates[name]:.1f}", f"{grown[name]:.1f}") for name in found]
    table = Table(HEADER, rows)
    parts = {
        f"{name} {part}": Spread.of(sent.parts[part] for sent in every)
        for name, every in found.items()
        for part in every[0].parts
    }
    lines = [f"{name}, longest of all workers: {spread:.2f} s" for name, spread in parts.items()]
    content = {
        "seconds": {name: asdict(spread) for name, spread in seconds.items()},
        "gb_per_s": {name: asdict(spread) for name, spread in rates.items()},
        "driver_grew_by_mb": grown,
        "parts_s": {name: asdict(spread) for name, spread in parts.items()},
    }
    return Report(content=content, text="\n".join([str(table), *lines]), markdown=table.markdown())


BENCHMARK = Benchmark("weights", Options, measure)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
