"""Stages that get into trouble where their config says so: by worker, what to do in `run`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from rlinf_embodied.cluster.hardware import EMULATED
from rlinf_embodied.runtime.host import Call, Output, Receipt, StageContext, StepContext
from rlinf_embodied.runtime.session import Session, of_type
from rlinf_embodied.telemetry.progress import report_progress
from rlinf_embodied.workflow.graph import StageSpec

NEVER_S = 300


def fall(fate: object) -> None:
    """Does what its config says."""
    if fate == "die":
        os.kill(os.getpid(), 9)
    if fate == "raise":
        raise ValueError("a fault")
    if fate == "stop":
        os.kill(os.getpid(), 19)
    if fate == "work":
        for _ in range(30):
            time.sleep(0.1)
            report_progress()
    if fate == "livelock":
        spin_until(time.monotonic() + NEVER_S)


def spin_until(end: float) -> None:
    while time.monotonic() < end:
        pass


class Gang:
    """Sums over its members; in iteration 1 a worker has its fate before it comes to the others."""

    def __init__(self, config: dict[int, str]) -> None:
        self.fates = config

    def setup(self, context: StageContext) -> int:
        self.worker, self.group = context.worker, context.group
        return os.getpid()

    def run(self, step_context: StepContext, inputs: dict[int, list[object]]) -> Output:
        if step_context.iteration == 1:
            fall(self.fates.get(self.worker))
        torch = sys.modules.get("torch")  # a worker that emulates has none
        value = float(self.worker) if torch is None else torch.tensor([float(self.worker)])
        parts = self.group.exchange([value], [1] * self.group.size)
        return Output(dict.fromkeys(inputs), sum(float(value) for part in parts for value in part))


class Maker:
    """Gives a block its number; as Gang, without a group."""

    def __init__(self, config: dict[int, str]) -> None:
        self.fates = config

    def setup(self, context: StageContext) -> int:
        self.worker = context.worker
        return os.getpid()

    def run(self, step_context: StepContext, inputs: dict[int, list[object]]) -> Output:
        if step_context.iteration == 1:
            fall(self.fates.get(self.worker))
        return Output({block: block for block in inputs}, sorted(inputs))


class Turns:
    """Either side of a loop: adds to what it is given; in chunk-step 1 of iteration 1 a worker has its fate.

    The fate "end it" is for the process that the step's message names.
    """

    def __init__(self, config: dict[int, str]) -> None:
        self.fates = config

    def setup(self, context: StageContext) -> int:
        self.worker = context.worker
        return os.getpid()

    def open(self, step_context: StepContext, blocks: Sequence[int]) -> dict[int, int]:
        return {block: 100 * block for block in blocks}

    def step(self, step_context: StepContext, given: dict[int, int]) -> dict[int, int]:
        if (step_context.iteration, step_context.chunk_step) == (1, 1):
            fate = self.fates.get(self.worker)
            if fate == "end it":
                os.kill(int(str(step_context.message)), 9)
            fall(fate)
        return {block: value + 1 for block, value in given.items()}

    def close(self, step_context: StepContext, last: dict[int, int | None]) -> Output:
        return Output(last, last)


def build(session: Session, kind: str, fates: dict[int, str], device: str = EMULATED) -> list[object]:
    """Returns the pids of two workers, which have a stage."""
    contexts = [StageContext(k, device, (k,), ((k,),), 2, (0, 1)) for k in range(2)]
    return session.add_stage(StageSpec("stage", f"troubled.{kind}", fates, collective=kind == "Gang"), contexts)


def run(session: Session, iteration: int) -> list[Receipt]:
    calls = [(k, Call("stage", "run", StepContext(iteration), (k,)), []) for k in range(2)]
    refs = [refs[-1] for refs in session.submit(calls)]
    return of_type(session.fetch(refs, "stage.run"), Receipt)
