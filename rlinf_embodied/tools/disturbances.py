"""A Ray session that kills or stops workers, or makes calls fail, by a schedule of faults."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rlinf_embodied.config import ClusterConfig
from rlinf_embodied.runtime.host import Call, StageContext
from rlinf_embodied.runtime.ray_session import RaySession
from rlinf_embodied.runtime.session import Ref
from rlinf_embodied.tools.chaos import Chaos, Fault
from rlinf_embodied.workflow.graph import StageSpec

LEARNERS = ("actor", "critic")
_WARM_START_METHODS = ("open_sources", "collect", "prepare")  # of a warm start's learner
_TOOL_WITHIN_S = 60.0  # how long to wait for a tool's process in a loop's call, which may start none
_METHODS = {
    "export_weights": "transfer",
    "install_weights": "transfer",
    "export_snapshot": "snapshot",
    "import_snapshot": "restore",
    "save": "checkpoint",
}


def phase_of(stage: str, method: str) -> str:
    """Returns the phase that a call belongs to."""
    if stage in ("new policy", "fine_tuning") or method in _WARM_START_METHODS:
        return "warm start"
    if stage.startswith("eval") or stage == "answers":
        return "evaluation"
    return _METHODS.get(method, "update" if stage in LEARNERS else "rollout")


class ChaosSession(RaySession):
    """Ray workers with the faults of a `Chaos`, each in its phase."""

    def __init__(self, config: ClusterConfig, chaos: Chaos) -> None:
        super().__init__(config.object_store_bytes, config.hang_after_s, config.first_progress_s)
        self._chaos = chaos

    def add_stage(self, spec: StageSpec, contexts: Sequence[StageContext]) -> list[object]:
        fault = self._chaos.due("set-up", self.attempt) if phase_of(spec.name, "") in ("update", "rollout") else None
        if fault is not None and fault.kind != "exception":
            self._strike(fault, [context.worker for context in contexts], f"{spec.name}.setup")
        elif fault is not None:
            self._chaos.happens(fault, self.attempt, f"worker {contexts[0].worker}, {spec.name}.setup")
            spec = replace(spec, config=None)  # fails, since every stage needs one
        return super().add_stage(spec, contexts)

    def submit(self, calls: Sequence[tuple[int, Call, Sequence[Ref]]], collective: bool = False) -> list[list[Ref]]:
        phase = phase_of(calls[0][1].stage, calls[0][1].method) if calls else ""
        first = calls[0][1] if calls else None
        fault = self._chaos.due(phase, self.attempt, first.stage if first else "")
        if fault is None:
            answers = super().submit(calls, collective)
            runs_tool = first and (
                first.method in ("loop", "relay") or (first.stage, first.method) == ("episodes", "step")
            )
            if runs_tool and (fault := self._chaos.due("tool", self.attempt)):
                self._kill_tool(fault)
            return answers
        chosen = int(fault.draw * len(calls))
        worker, call, payloads = calls[chosen]
        if fault.kind == "exception":
            self._chaos.happens(fault, self.attempt, f"worker {worker}, {call}")
            unknown = f"fault_{len(self._chaos.come)}"  # no stage has it; the number of results is kept
            wrong = replace(call, method=unknown) if len(call.makers) == 1 else replace(call, partner=unknown)
            calls = [*calls[:chosen], (worker, wrong, payloads), *calls[chosen + 1 :]]
        else:
            self._strike(fault, [worker], str(call))
        return super().submit(calls, collective)

    def _kill_tool(self, fault: Fault) -> None:
        """Waits until a tool's program runs, and kills it or another process of the tool."""
        end = time.monotonic() + _TOOL_WITHIN_S
        while time.monotonic() < end:
            for worker, pid in self.processes().items():
                if len(tool := descendants(pid)) > 1:  # more than the process that waits for programs
                    chosen = int(fault.draw * len(tool))
                    _send(tool[chosen], signal.SIGKILL)
                    met = f"worker {worker} (pid {pid}), process {chosen + 1} of {len(tool)} of its tool"
                    return self._chaos.happens(fault, self.attempt, met)
            time.sleep(0.001)

    def _strike(self, fault: Fault, workers: Sequence[int], call: str) -> None:
        targets = [(worker, pid) for worker, pid in self.processes().items() if worker in workers]
        if not targets:
            return
        worker, pid = targets[int(fault.draw * len(targets))]
        self._chaos.happens(fault, self.attempt, f"worker {worker} (pid {pid}), {call}")
        timer = threading.Timer(fault.delay_s, _send, (pid, getattr(signal, fault.kind)))
        timer.daemon = True
        timer.start()


def descendants(pid: int) -> list[int]:
    """Returns the ids of a process's descendants, each followed by its own descendants."""
    pids: list[int] = []
    with suppress(OSError):  # the process has ended
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                pids += [child, *descendants(child)]
    return pids


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
