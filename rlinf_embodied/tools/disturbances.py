"""What is done to processes, to Ray's store and to its nodes, and a session in which it happens."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import ray
from ray.cluster_utils import Cluster

from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.execution.meter import METER
from rlinf_embodied.runtime.host import Call, StageContext
from rlinf_embodied.runtime.ray_session import RaySession
from rlinf_embodied.runtime.session import Ref
from rlinf_embodied.tools.chaos import STORE_BYTES, Chaos, Fault
from rlinf_embodied.workflow.graph import StageSpec

FULL_S = 3.0  # for which the disk or the store is full


def later(seconds: float, work: Callable[[], None]) -> None:
    """Does something after a while, unless the program has ended."""
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()


def send(pid: int, number: int) -> None:
    """Sends a signal to a process, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def allow_files(pid: int, num_bytes: int | None) -> None:
    """Limits the size of the files that a process writes: 0 lets all writes fail, as on a full disk; None: none."""
    with suppress(ProcessLookupError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most if num_bytes is None else num_bytes, most))


def fill_store(num_bytes: int, seconds: float) -> None:
    """Puts as much into the driver's object store as it holds, for a while."""
    piece = num_bytes // 8
    pieces = [ray.put(np.zeros(piece, dtype=np.uint8)) for _ in range(8)]
    later(seconds, pieces.clear)


@contextmanager
def two_nodes() -> Iterator[tuple[str | None, Callable[[], None]]]:
    """A Ray cluster of two nodes in this machine: its address, and what ends the second one."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # short: Ray's sockets lie in it
        os.environ["RAY_TMPDIR"] = folder
        nodes = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "object_store_memory": STORE_BYTES},
            shutdown_at_exit=False,
        )
        try:
            second = nodes.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
            yield nodes.address, lambda: nodes.remove_node(second, allow_graceful=False)
        finally:
            ray.shutdown()
            nodes.shutdown()
            del os.environ["RAY_TMPDIR"]


LEARNERS = ("actor", "critic")
_DEMONSTRATES = ("open_sources", "collect", "prepare")  # of the learner of a warm start
_METHODS = {
    "export_weights": "transfer",
    "install_weights": "transfer",
    "export_snapshot": "snapshot",
    "import_snapshot": "restore",
    "save": "checkpoint",
    "export_state": "checkpoint",
}


def phase_of(stage: str, method: str) -> str:
    """Returns the phase that a call belongs to."""
    if stage == METER.name:
        return "profile"
    if stage in ("new policy", "fine_tuning") or method in _DEMONSTRATES:
        return "warm start"
    if stage.startswith("eval") or stage == "answers":
        return "evaluation"
    return _METHODS.get(method, "update" if stage in LEARNERS else "rollout")


class ChaosSession(RaySession):
    """Ray workers that meet the faults of a `Chaos`, each in its phase."""

    def __init__(self, config: ClusterConfig, chaos: Chaos, end_node: Callable[[], None] = lambda: None) -> None:
        """Starts or joins Ray.

        Args:
            config: time limits and the size of the store.
            chaos: what is to happen; it hears what did.
            end_node: ends all processes of the second node.
        """
        super().__init__(config.object_store_bytes, config.hang_after_s, config.first_progress_s)
        self._chaos, self._end_node = chaos, end_node

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        """A fault of the set-up comes here."""
        fault = self._chaos.due("set-up", self.attempt) if phase_of(spec.name, "") in ("update", "rollout") else None
        if fault is not None and fault.kind != "exception":
            self._strike(fault, [context.worker for context in contexts], f"{spec.name}.setup")
        elif fault is not None:
            self._chaos.happens(fault, self.attempt, f"worker {contexts[0].worker}, {spec.name}.setup")
            spec = replace(spec, config=None)  # no stage can do without
        return super().add_stage(spec, contexts)

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        """All other faults come here."""
        phase = phase_of(calls[0][1].stage, calls[0][1].method) if calls else ""
        fault = self._chaos.due(phase, self.attempt)
        if fault is None:
            return super().submit(calls, collective)
        chosen = int(fault.draw * len(calls))
        worker, call, payloads = calls[chosen]
        if fault.kind == "full store":
            self._chaos.happens(fault, self.attempt, f"the store, {call}")
            fill_store(STORE_BYTES, FULL_S)
        elif fault.kind == "lost node":
            self._chaos.happens(fault, self.attempt, f"the second node, {call}")
            self._end_node()
        elif fault.kind == "exception":
            self._chaos.happens(fault, self.attempt, f"worker {worker}, {call}")
            wrong = replace(call, method=f"fault_{len(self._chaos.come)}")  # no stage has it
            calls = [*calls[:chosen], (worker, wrong, payloads), *calls[chosen + 1 :]]
        else:
            self._strike(fault, [worker], str(call))
        return super().submit(calls, collective)

    def _strike(self, fault: Fault, workers: Sequence[int], call: str) -> None:
        """Sends the signal a little later to one of these workers."""
        known = [(worker, pid) for worker, pid in self.processes().items() if worker in workers]
        if not known:
            return
        worker, pid = known[int(fault.draw * len(known))]
        self._chaos.happens(fault, self.attempt, f"worker {worker} (pid {pid}), {call}")
        if fault.kind == "full disk":
            allow_files(pid, 0)
            later(FULL_S, lambda: allow_files(pid, None))
        else:
            later(fault.delay_s, lambda: send(pid, getattr(signal, fault.kind)))
