"""The order of submission follows from the tree alone."""

from __future__ import annotations

import plan_cases as planning
import pytest

from rlinf_embodied.errors import PlanError
from rlinf_embodied.execution.schedule import schedule
from rlinf_embodied.planning.notation import resolve
from rlinf_embodied.planning.plan import Leaf, Node, Plan, Spatial, Temporal
from rlinf_embodied.workflow.graph import WHOLE, Edge, StageSpec, Workflow

A, B, C = Leaf("a", (0,)), Leaf("b", (0,)), Leaf("c", (1,))


def work(*, at_once: str = "", whole: tuple[str, str] | None = None) -> Workflow:
    stages = {name: StageSpec(name, f"fakes.{name}", None, at_once=name == at_once) for name in "abc"}
    edges = tuple(Edge(s, t, granularities=(WHOLE,) if (s, t) == whole else ()) for s, t in (("a", "b"), ("b", "c")))
    return Workflow("chain", 4, stages, edges)


def order(tree: Node, workflow: Workflow) -> str:
    plan = resolve("p", [Plan("p", 2, tree).to_dict()], 2, workflow)
    return " ".join(f"{s.node.stage}{s.chunk}" for s in schedule(plan, workflow) if isinstance(s.node, Leaf))


def test_turns_alternate_chunk_by_chunk_inside_a_stream() -> None:
    assert order(Spatial((Temporal((A, B)), C), 2), work()) == "a0 b0 c0 a1 b1 c1"


@pytest.mark.parametrize(
    ("parts", "workflow"),
    [
        (Temporal((A, B), resident=False), work()),
        (Temporal((A, B)), work(whole=("a", "b"))),
        (Temporal((A, B)), work(at_once="a")),
    ],
)
def test_where_turns_cannot_alternate_the_first_part_does_all_its_chunks(parts: Node, workflow: Workflow) -> None:
    found = order(Spatial((parts, C), 2), workflow).split()
    assert [call for call in found if call[0] != "c"] == ["a0", "a1", "b0", "b1"]
    assert found.index("b0") < found.index("c0")
    assert found.index("b1") < found.index("c1")


def test_without_granularity_everything_is_one_chunk() -> None:
    assert order(Spatial((Temporal((A, B)), C)), work()) == "a0 b0 c0"


def test_a_stream_along_an_edge_that_needs_everything_is_refused() -> None:
    streamed = Spatial((Temporal((A, B)), C), 2)
    with pytest.raises(PlanError, match=r"streams 2 blocks at a time, but edge b -> c passes on all blocks at once"):
        order(streamed, work(whole=("b", "c")))


def test_a_stage_that_takes_all_at_once_and_a_loop_are_not_called_by_chunks() -> None:
    stages = {n: StageSpec(n, "fakes.x", None, granularities=(WHOLE,) if n == "c" else ()) for n in "abc"}
    whole = Workflow("w", 4, stages, (Edge("a", "b", granularities=()), Edge("b", "c", granularities=())))
    with pytest.raises(PlanError, match=r"calls c for 2 blocks at a time, but it accepts \(0,\)"):
        order(Spatial((Temporal((A, B)), C), 2), whole)
    embodied, _ = planning.embodied((1, 0), (1, 0), (1, 0))
    loop = {"loop": {"name": "rollout", "shards": 1, "stages": {"env": [0], "policy": [0]}}}
    tree = {"spatial": {"granularity": 2, "parts": [loop, {"leaf": {"stage": "actor", "devices": [1]}}]}}
    with pytest.raises(PlanError, match=r"loop rollout inside a spatial node of granularity 2"):
        resolve("p", [{"tree": tree}], 2, embodied)


def test_blocks_of_a_chunk_are_spread_over_all_devices_of_a_stage() -> None:
    plan = Plan("p", 3, Spatial((A, Leaf("b", (1, 2))), 2))
    assert plan.owners("b", 4) == (1, 2, 1, 2)
    assert Plan("p", 3, Temporal((A, Leaf("b", (1, 2))))).owners("b", 4) == (1, 1, 2, 2)


def test_stages_are_exclusive_across_the_parts_of_a_switching_node_only() -> None:
    plan = Plan("p", 2, Temporal((Temporal((A, B)), C), resident=False))
    assert plan.exclusive() == {"a": {"c"}, "b": {"c"}, "c": {"a", "b"}}
