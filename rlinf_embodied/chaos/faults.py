"""Which fault comes when: a schedule drawn from a seed, each fault when the run has recovered from the one before."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

KINDS = ("SIGKILL", "SIGSTOP", "exception")
SPECIAL = (("checkpoint", "full disk"), ("transfer", "full store"), ("snapshot", "full store"))
ENDURED = ("full disk", "full store")  # nobody has to recover from these
LAST = ("rollout", "lost node")
FIRST = ("warm start", "profile", "set-up")  # these come once
AGAIN = ("rollout", "update", "transfer", "snapshot", "checkpoint", "evaluation")  # these come in every iteration
MISSING = {"auto": ("transfer",), "collocated": ("profile", "transfer")}  # auto: whatever shares workers may win
_LATEST_S = 0.2  # after a call was submitted


@dataclass(slots=True)
class Fault:
    """What is to happen, and what came of it."""

    phase: str
    kind: str
    draw: float  # in [0, 1): whom it meets
    delay_s: float
    met: str = ""  # the worker and its call
    at: float = 0.0  # seconds since the epoch


def schedule(number: int, seed: int, missing: Sequence[str] = (), nodes: int = 1) -> list[Fault]:
    """Returns faults in the order in which they come: every kind meets every phase when there are enough.

    Args:
        number: of faults.
        seed: of what happens to whom.
        missing: phases that do not come under the plan.
        nodes: with more than one the last fault is the end of a node.
    """
    draw = random.Random(seed)
    pairs = [*SPECIAL, *((phase, kind) for phase in AGAIN for kind in KINDS)]
    pairs = [(phase, kind) for phase, kind in pairs if phase not in missing]
    chosen = [(phase, draw.choice(KINDS)) for phase in FIRST if phase not in missing][: number // 2]
    while len(chosen) < number:
        draw.shuffle(pairs)
        chosen += pairs[: number - len(chosen)]
    if nodes > 1:
        chosen[-1] = LAST
    return [Fault(phase, kind, draw.random(), draw.uniform(0, _LATEST_S)) for phase, kind in chosen]


@dataclass(slots=True)
class Chaos:
    """Faults that come one after the other."""

    faults: list[Fault]
    attempt: int = -1  # in which the last one came
    come: list[Fault] = field(default_factory=list)

    def due(self, phase: str, attempt: int) -> Fault | None:
        """Returns the next fault if it belongs into this phase and the one before was recovered from."""
        if len(self.come) == len(self.faults) or attempt == self.attempt:
            return None
        fault = self.faults[len(self.come)]
        return fault if fault.phase == phase else None

    def happens(self, fault: Fault, attempt: int, met: str) -> None:
        """Notes that a fault comes now."""
        fault.met, fault.at = met, time.time()
        if fault.kind not in ENDURED:
            self.attempt = attempt
        self.come.append(fault)
