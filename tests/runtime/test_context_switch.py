"""A worker holds one of several exclusive stages at a time."""

from __future__ import annotations

import pytest
from any_plan import Fake, fake

from rlinf_embodied.errors import PlanError
from rlinf_embodied.runtime.host import Call, Receipt, StepContext, WorkerHost, WorkerSpec, solo_context
from rlinf_embodied.workflow.graph import StageSpec


def host(**exclusive: set[str]) -> WorkerHost:
    worker = WorkerHost(WorkerSpec(0, "cpu"))
    for number, (name, others) in enumerate(exclusive.items()):
        context = solo_context(range(2))
        context.exclusive = frozenset(others)
        worker.add_stage(fake(name, number), context)
    return worker


def offloaded(worker: WorkerHost) -> set[str]:
    return {name for name, stage in worker.stages.items() if isinstance(stage, Fake) and stage.offloaded}


def spans(worker: WorkerHost, stage: str, method: str) -> list[str]:
    (*_, receipt) = worker.invoke(Call(stage, method, StepContext(0), blocks=(0, 1) if method == "run" else ()), [])
    assert isinstance(receipt, Receipt)
    return [span.name for span in receipt.spans]


def test_a_call_makes_room_and_comes_back() -> None:
    worker = host(a={"c"}, b={"c"}, c={"a", "b"})
    assert offloaded(worker) == {"a", "b"}  # made for the last one that was built
    assert spans(worker, "b", "run") == ["c.offload", "b.onload", "b.run"]
    assert offloaded(worker) == {"a", "c"}
    assert spans(worker, "a", "run") == ["a.onload", "a.run"]
    assert spans(worker, "a", "run") == ["a.run"]
    assert spans(worker, "c", "enter") == ["a.offload", "b.offload", "c.onload"]
    assert spans(worker, "c", "run") == ["c.run"]


def test_a_stage_that_was_replaced_is_not_offloaded() -> None:
    worker = host(a={"b"}, b={"a"})
    worker.add_stage(fake("a", 0), solo_context(range(2)))
    assert spans(worker, "a", "run") == ["a.run"]


def test_a_plan_that_switches_what_cannot_be_switched_is_refused() -> None:
    context = solo_context(range(1))
    context.exclusive = frozenset({"actor"})
    with pytest.raises(PlanError, match=r"takes env out of the memory of cpu for actor, but a Maker stays there"):
        WorkerHost(WorkerSpec(0, "cpu")).add_stage(StageSpec("env", "fakes.Maker", None), context)
