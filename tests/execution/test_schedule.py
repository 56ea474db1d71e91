"""The order of submission follows from the plan alone."""

from __future__ import annotations

import pytest
from plan_cases import parse

from rlinf_embodied.planning.plan import schedule
from rlinf_embodied.workflow.graph import Edge, StageSpec, Workflow


def work(at_once: str = "") -> Workflow:
    stages = {name: StageSpec(name, f"fakes.{name}", None, at_once=name == at_once) for name in "abc"}
    return Workflow("chain", 4, stages, tuple(Edge(s, t, whole=False) for s, t in (("a", "b"), ("b", "c"))))


@pytest.mark.parametrize(
    ("text", "at_once", "order"),
    [
        ("a+b on 0 | c on 1 in 2 chunks", "", "a0 b0 c0 a1 b1 c1"),
        ("a+b on 0 > c on 1", "", "a0 b0 c0"),
        ("a on 0 > b on 0 | c on 1 in 2 chunks", "", "a0 b0 c0 b1 c1"),
        ("a+b on 0 | c on 1 in 2 chunks", "b", "a0 a1 b0 b1 c0 c1"),  # it works on all its blocks at once
    ],
)
def test_calls_are_submitted_item_by_item_and_chunk_by_chunk(text: str, at_once: str, order: str) -> None:
    plan = parse(text, 2, work(at_once))
    assert " ".join(f"{step.stages[0]}{step.chunk}" for step in schedule(plan.items, work(at_once))) == order
