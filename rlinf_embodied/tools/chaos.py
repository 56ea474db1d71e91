"""Fault injection: kills or stops workers, or makes their calls fail, by a schedule while a training runs.

A schedule drawn from a seed determines which worker fails in which phase.  The next fault is injected after the run has
recovered from the previous one (disturbances.py).  Numerical libraries are imported only after a process is pinned.

    SIGKILL    the worker's process ends, as when memory runs out
    SIGSTOP    the worker hangs
    exception  the call raises

The phase "tool", which is used only on request, kills the process that runs a tool's program; the tool starts another
one, so the run has nothing to recover from.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf_embodied import train
from rlinf_embodied.config import ClusterConfig, MathConfig, TrainConfig
from rlinf_embodied.telemetry.tables import text_table

if TYPE_CHECKING:
    from rlinf_embodied.runtime.session import Session  # imports numpy; a process is pinned before that

KINDS = ("SIGKILL", "SIGSTOP", "exception")
FIRST = ("warm start", "set-up")  # phases that a run has once
AGAIN = ("rollout", "update", "transfer", "snapshot", "checkpoint", "evaluation")  # phases of every iteration
_TOOL = [("tool", "SIGKILL")] * 3
_LATEST_S = 0.2  # maximum delay of a fault after the call was submitted


@dataclass(slots=True)
class Fault:
    """A fault, and the worker that it hit."""

    phase: str  # or the name of a stage
    kind: str
    draw: float  # in [0, 1): chooses the worker
    delay_s: float
    met: str = ""  # the worker and its call
    at: float = 0.0  # seconds since the epoch


def schedule(number: int, seed: int, missing: Sequence[str] = ("tool",)) -> list[Fault]:
    """Returns `number` faults in order: every kind in every phase but the missing ones, if there are enough."""
    draw = random.Random(seed)
    pairs = [pair for pair in [*itertools.product(AGAIN, KINDS), *_TOOL] if pair[0] not in missing]
    chosen = [(phase, draw.choice(KINDS)) for phase in FIRST if phase not in missing][: number // 2]
    while len(chosen) < number:
        draw.shuffle(pairs)
        chosen += pairs[: number - len(chosen)]
    return [Fault(phase, kind, draw.random(), draw.uniform(0, _LATEST_S)) for phase, kind in chosen]


@dataclass(slots=True)
class Chaos:
    """A sequence of faults, injected one after the other."""

    faults: list[Fault]
    attempt: int = -1  # the attempt of the last injected fault
    come: list[Fault] = field(default_factory=list)  # injected so far

    def due(self, phase: str, attempt: int, stage: str = "") -> Fault | None:
        """Returns the next fault if it belongs to this phase or stage and the run has recovered from the last one."""
        if len(self.come) == len(self.faults) or attempt == self.attempt:
            return None
        fault = self.faults[len(self.come)]
        return fault if fault.phase in (phase, stage) else None

    def happens(self, fault: Fault, attempt: int, met: str) -> None:
        fault.met, fault.at, self.attempt = met, time.time(), -1 if fault.phase == "tool" else attempt
        self.come.append(fault)


def disturbed(config: TrainConfig | MathConfig, chaos: Chaos) -> str:
    """Runs a training with faults to its end and returns the digest of its weights."""

    def session(cluster: ClusterConfig) -> Session:
        from rlinf_embodied.tools.disturbances import ChaosSession  # imports torch, after pinning

        return ChaosSession(cluster, chaos)

    return train(config, sessions=session)["weights_sha256"]


def report(chaos: Chaos, folder: Path) -> str:
    """Returns a table of the seconds lost by each fault, with their median and maximum."""
    path = folder / "recoveries.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    last = f"{len(chaos.come)} of {len(chaos.faults)} faults injected, {len(records)} recoveries"
    rows, costs, ends = [], [], [fault.at for fault in chaos.come[1:]] + [float("inf")]
    for fault, until in zip(chaos.come, ends, strict=False):
        recoveries = [record for record in records if fault.at <= record["at"] < until]
        costs.append(sum(record["lost_s"] + record["recovery_s"] for record in recoveries))
        detected_s = min((record["at"] for record in recoveries), default=fault.at) - fault.at
        seconds = {"detected after s": f"{detected_s:.1f}", "lost s": f"{costs[-1]:.1f}"}
        rows.append({"fault": fault.kind, "phase": fault.phase, "worker and call": fault.met, **seconds})
    if rows:
        last += f"; seconds lost per fault: median {statistics.median(costs):.1f}, worst {max(costs):.1f}"
    return f"{text_table(rows, 'faults:')}\n{last}"
